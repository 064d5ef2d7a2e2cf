"""``verify_chain`` against plain loops, and its walk down trees on every backend."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec_fast.batch.sampling_batch import Adjustments, Sampling
from specdec_fast.ops import all_ops
from support.fuzzing import fuzz
from support.grids import each_value_once, grid
from support.op_cases import CPU, each_case, each_dtype, make
from support.op_checks import device_for, same_bits
from support.sampling_by_hand import targets_by_hand
from support.strategies import CPP, TRITON, CallSizes, VerifyCall, verify_calls
from support.strategies_sampling import Rule, SampledCall, sampled_calls
from support.strategies_trees import TreeCall, tree_calls
from support.trees import paths_of

OP = all_ops()["verify_chain"]


def greedy_by_hand(logits: Tensor) -> list[int]:
    targets = []
    for row in logits.tolist():
        best = 0
        for token, logit in enumerate(row):
            if logit > row[best]:  # strictly, so the lowest id among equals stays
                best = token
        targets.append(-1 if any(map(math.isnan, row)) else best)
    return targets


def verify_by_hand(
    logits: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    sampling: Sampling | None = None,
    parents: Tensor | None = None,
) -> tuple[list[int], ...]:
    if parents is not None:
        return verify_trees_by_hand(logits, token_ids, cu_seqlens, sampling, parents)
    targets = greedy_by_hand(logits) if sampling is None else targets_by_hand(logits, token_ids, cu_seqlens, sampling)
    num_accepted, next_tokens, fed = [], [], token_ids.tolist()
    for start, stop in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        accepted = 0
        for row in range(start + 1, stop):
            if fed[row] != targets[row - 1]:
                break
            accepted += 1
        num_accepted.append(accepted)
        next_tokens.append(targets[start + accepted])
    return targets, num_accepted, next_tokens


def verify_trees_by_hand(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling | None, parents: Tensor
) -> tuple[list[int], ...]:
    """Every row as the last one of a chain: the rows on the path to it, as a sequence of its own."""
    targets, num_accepted, next_tokens, accepted_rows = [], [], [], []
    for b, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        for path in paths_of(range(start, stop), parents[start:stop].tolist()):
            chain = torch.tensor(path)
            ends = torch.tensor([0, len(chain)], dtype=torch.int32)
            rule = None if sampling is None else only(sampling, b, list(path))
            targets.append(verify_by_hand(logits[chain], token_ids[chain], ends, rule)[0][-1])
        path, row = [], start
        while True:
            children = [child for child in range(start, stop) if start + int(parents[child]) == row != child]
            equal = [child for child in children if int(token_ids[child]) == targets[row]]
            if not equal:
                break
            row = equal[0]
            path.append(row - start)
        num_accepted.append(len(path))
        next_tokens.append(targets[row])
        accepted_rows += path + [-1] * (stop - start - len(path))
    return targets, num_accepted, next_tokens, accepted_rows


def only(sampling: Sampling, b: int, rows: list[int]) -> Sampling:
    """How sequence ``b`` alone chooses in some of its rows."""
    ragged = ("seen_ids", "cu_seen", "bias_ids", "bias_values", "cu_bias", "adjustments", "allowed")
    own = {name: value[b : b + 1] for name, value in vars(sampling).items() if name not in ragged}
    first, last = sampling.cu_seen[b : b + 2].tolist()
    cu_seen = torch.tensor([0, last - first], dtype=torch.int32)
    if (added := sampling.adjustments) is not None:
        biases = slice(*added.cu_bias[b : b + 2].tolist())
        columns = {name: value[b : b + 1] for name, value in vars(added).items() if name not in ragged}
        own["adjustments"] = Adjustments(
            **columns,
            bias_ids=added.bias_ids[biases],
            bias_values=added.bias_values[biases],
            cu_bias=torch.tensor([0, biases.stop - biases.start], dtype=torch.int32),
        )
    allowed = None if sampling.allowed is None else sampling.allowed[rows]
    return Sampling(**own, seen_ids=sampling.seen_ids[first:last], cu_seen=cu_seen, allowed=allowed)


@each_value_once
@each_dtype
@each_case("verify_chain")
def test_verify_chain(case, dtype):
    args = make("verify_chain", case, dtype, seed=dtype.itemsize)
    got = OP.load("torch")(**args)
    assert tuple(x.tolist() for x in got) == verify_by_hand(**args)
    expected = [torch.int64, torch.int32, torch.int64, *([torch.int32] if "parents" in args else [])]
    assert [x.dtype for x in got] == expected


@pytest.mark.parametrize("case", ["ragged", "trees"])
def test_cases_accept_some_none_and_all(case):
    # otherwise the comparisons above would test little
    outcomes = set()
    for seed in range(8):
        args = make("verify_chain", case, seed=seed)
        for b, accepted in enumerate(verify_by_hand(**args)[1]):
            start, stop = args["cu_seqlens"][b : b + 2].tolist()
            above = args["parents"][start:stop].tolist() if case == "trees" else range(-1, stop - start - 1)
            most = max(map(len, paths_of(range(start, stop), above))) - 1
            outcomes.add("all" if accepted == most else "none" if accepted == 0 else "some")
    assert outcomes == {"none", "some", "all"}


# Mistakes that the declared cases must show. The first two take other parents, the others another child.
def all_below_the_first(parents: Tensor) -> Tensor:
    return parents.clamp(max=0)


def rows_as_a_chain(parents: Tensor) -> Tensor:
    rows = torch.arange(len(parents))
    first = torch.where(parents < 0, rows, 0).cummax(0).values
    return (rows - first - 1).int()


@pytest.mark.parametrize("case", ["trees", "sampled_trees"])
@pytest.mark.parametrize("mistake", [all_below_the_first, rows_as_a_chain])
def test_cases_show_wrong_parents(case, mistake):
    def is_equal(seed: int) -> bool:
        args = make("verify_chain", case, seed=seed)
        wrong = OP.load("torch")(**{**args, "parents": mistake(args["parents"])})
        return same_bits(wrong, OP.load("torch")(**args))

    assert not all(is_equal(seed) for seed in range(8))  # the first that differs is enough


@pytest.mark.parametrize("case", ["trees", "sampled_trees"])
@pytest.mark.parametrize("mistake", ["only the first child", "the last child that is equal"])
def test_cases_show_a_wrong_child(case, mistake):
    for seed in range(8):
        args = make("verify_chain", case, seed=seed)
        targets, *_, accepted_rows = (x.tolist() for x in OP.load("torch")(**args))
        fed, parents, found = args["token_ids"].tolist(), args["parents"].tolist(), []
        for start, stop in pairwise(args["cu_seqlens"].tolist()):
            row, path = 0, []
            while children := [c for c in range(1, stop - start) if parents[start + c] == row]:
                tried = children[:1] if mistake == "only the first child" else children[::-1]
                row = next((c for c in tried if fed[start + c] == targets[start + row]), stop)
                path += [row] * (row < stop)
            found += path + [-1] * (stop - start - len(path))
        if found != accepted_rows:
            return
    raise AssertionError("no case shows the mistake")


BACKENDS = list(OP.implementations)


# Interpreted sampling takes seconds.
CHAINS = grid(
    product(["ragged", "sampled", "nan", "plain_decoding"], BACKENDS), keep=lambda c: c != ("sampled", "triton")
)


@pytest.mark.parametrize(("case", "backend"), CHAINS)
def test_a_chain_described_as_a_tree(case, backend):
    """Equal results, and the accepted rows are the first ones."""
    device = device_for(OP, backend)
    args = {name: moved(value, device) for name, value in make("verify_chain", case).items()}
    above: list[int] = []
    for start, stop in pairwise(args["cu_seqlens"].tolist()):
        above += range(-1, stop - start - 1)
    verify = OP.load(backend)
    *got, accepted_rows = verify(**args, parents=torch.tensor(above, dtype=torch.int32, device=device))
    assert same_bits(tuple(got), verify(**args))
    rows = accepted_rows.tolist()
    for (start, stop), accepted in zip(pairwise(args["cu_seqlens"].tolist()), got[1].tolist(), strict=True):
        assert rows[start:stop] == [*range(1, accepted + 1), *[-1] * (stop - start - accepted)]


def moved(value: Any, device: torch.device) -> Any:
    if value is None:
        return None
    if isinstance(value, (Sampling, Adjustments)):
        return replace(value, **{name: moved(tensor, device) for name, tensor in vars(value).items()})
    return value.to(device)


def assert_equals_oracle(backend: str, call: TreeCall) -> None:
    device = device_for(OP, backend)
    assert same_bits(OP.load(backend)(**call.make(device)), OP.load("torch")(**call.make(device)))


VOCAB_SIZES = st.integers(2, 70) | st.sampled_from((255, 256, 1025, 4097))


def calls(limits: CallSizes, batch: int) -> st.SearchStrategy[TreeCall]:
    greedy, sampled = (make_calls(limits, VOCAB_SIZES, batch) for make_calls in (verify_calls, sampled_calls))
    return tree_calls(greedy | sampled)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_presence_penalty_that_fp32_has_not_got_decides(backend):
    """The accepted token 0 is less likely by so little that fp32 would round it to nothing."""
    rule = Rule(0.0, 0, 1.0, 0.0, 1.0, num_seen=0, num_prompt=0, presence=2e-127, frequency=0.0, position=0)
    call = SampledCall(VerifyCall((2,), 2, 1, (), (), "contiguous", torch.float32, 0), (rule,), False, True, 0)
    args = call.make(CPU)
    added = args["sampling"].adjustments
    added = replace(added, bias_values=torch.zeros_like(added.bias_values))
    args |= {"token_ids": torch.tensor([0, 0]), "sampling": replace(args["sampling"], adjustments=added)}
    expected = verify_by_hand(**args)
    assert expected[1:] == ([1], [1])  # one row accepted, then token 1
    assert tuple(x.tolist() for x in OP.load("torch")(**args)) == expected
    own = {name: moved(value, device_for(OP, backend)) for name, value in args.items()}
    assert tuple(x.tolist() for x in OP.load(backend)(**own)) == expected


@fuzz(40)
@given(call=calls(CPP, 5))
def test_trees_in_cpp(call):
    assert_equals_oracle("cpp", call)


@pytest.mark.grid
@fuzz(400)
@given(call=calls(CPP, 5))
def test_trees_in_cpp_at_length(call):
    assert_equals_oracle("cpp", call)


@fuzz(3)
@given(call=calls(TRITON, 3))
def test_trees_in_triton(call):
    assert_equals_oracle("triton", call)


@pytest.mark.grid
@fuzz(30)
@given(call=calls(TRITON, 3))
def test_trees_in_triton_at_length(call):
    assert_equals_oracle("triton", call)


@fuzz(12)
@given(call=calls(CPP, 3))
def test_trees_by_hand(call):
    args = call.make(CPU)
    assert tuple(x.tolist() for x in OP.load("torch")(**args)) == verify_by_hand(**args)
