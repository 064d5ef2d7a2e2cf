"""Every op on every backend against the oracle; and whether the bits of a row depend on anything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases import OP_CASES, Case, with_tensors
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.errors import BackendError
from specdec_fast.ops import BACKENDS, Op, all_ops
from support.grids import each_value_once, grid
from support.op_cases import CASES, DTYPES, attention_in_fp64, changed, each_dtype, make
from support.op_checks import (
    INTERPRETED,
    REFERENCES,
    assert_agrees,
    assert_implementation_agrees,
    assert_rows_independent,
    device_for,
    long_prefill,
    same_bits,
)

SEEDS = (0, 1)


# For the interpreter: other cases have the same features with fewer rows or tokens.
SLOW_CASES = ("large_vocabulary", "wide_tree", "sampled_trees", "adjusted", "sampled_odd_vocabulary", "int4_a8_threads")


def is_in_slice(op: Op, backend: str, case: str, number: int, dtype: str) -> bool:
    """Every case has one dtype, in turn; interpreted kernels get every 15th case, but no slow one."""
    served = ["fp32", "fp16"] if op.name in REFERENCES else ["fp32", "fp16", "bf16"]
    if backend not in INTERPRETED:
        return dtype == list(DTYPES)[number % len(DTYPES)]
    return number % 15 == 0 and dtype == served[number // 15 % len(served)] and case not in SLOW_CASES


SWEEP = [
    pytest.param(
        op, backend, case, DTYPES[dtype], id=f"{op.name}-{backend}-{case.name}-{dtype}",
        marks=() if is_in_slice(op, backend, case.name, number, dtype) else pytest.mark.grid,
    )
    for op in all_ops().values()
    for backend in op.implementations
    if backend != "torch"
    for number, case in enumerate(OP_CASES[op.name].cases)
    for dtype in DTYPES
]  # fmt: skip


def make_from_seed(case: Case, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return case.make(torch.Generator().manual_seed(seed), dtype, device)


@pytest.mark.parametrize(("op", "backend", "case", "dtype"), SWEEP)
def test_backend_agrees_with_the_oracle(op, backend, case, dtype):
    device = device_for(op, backend)
    if backend in INTERPRETED and op.name in REFERENCES and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bf16 matrices wrongly; copies and comparisons it does right")
    for seed in SEEDS[:1] if backend in INTERPRETED or case.name in SLOW_CASES else SEEDS:
        make_args = partial(make_from_seed, case, seed, dtype, device)
        try:
            assert_implementation_agrees(op, op.load(backend), make_args)
        except BackendError as error:
            if not BACKENDS[backend].partial:
                raise
            pytest.skip(f"{backend} does not serve this case: {error}")


def swapped(append: Callable[..., None], **args: Any) -> None:
    append(**{**args, "key": args["value"], "value": args["key"]})


def last_of_equals(verify: Callable[..., Any], **args: Any) -> Any:
    target, accepted, following = verify(**{**args, "logits": args["logits"].flip(1)})
    return args["logits"].shape[1] - 1 - target, accepted, following


def rising_only(compact: Callable[..., None], **args: Any) -> None:
    """One move after the other, all in rising order: right for moves down, and for moves up that do not overlap."""
    for m in range(args["sources"].numel()):
        one = {name: args[name][m : m + 1] for name in ("sources", "destinations")}
        compact(**{**args, **one, "cu_moves": (args["cu_moves"] > m).int()})


def from_the_left_only(realign: Callable[..., None], **args: Any) -> None:
    """Column after column from the left: right for shifts to the left, and to the right by more than the length."""
    for column in range(int(args["lengths"].max())):
        inside = args["lengths"] > column
        starts, shifts = (torch.where(inside, x, 0) for x in (args["starts"] + column, args["shifts"]))
        realign(**{**args, "starts": starts, "lengths": inside.int(), "shifts": shifts})


def of_32_bits(words_of: Callable[..., Tensor], **args: Any) -> Tensor:
    """Positions lose their high half."""
    return words_of(**{**args, "positions": args["positions"] & 0xFFFFFFFF})


def window_too_long(attention: Callable[..., Tensor], **args: Any) -> Tensor:
    return attention(**changed(args, "params.sliding_window", lambda window: window + 1))


def chunk_begins_late(attention: Callable[..., Tensor], **args: Any) -> Tensor:
    return attention(**changed(args, "params.attention_chunk", lambda chunk: chunk + 1))


# Negative controls: one plausible mistake per op.
@each_value_once
@each_dtype
@pytest.mark.parametrize(
    ("name", "case", "wrong"),
    [
        ("append_kv_", "verify", swapped),
        ("verify_chain", "tiny_vocabulary", last_of_equals),
        ("paged_attention", "window", window_too_long),
        ("paged_attention", "chunk", chunk_begins_late),
        ("noise_words", "level", of_32_bits),
        ("compact_kv_", "up", rising_only),
        ("compact_kv_", "both_directions", rising_only),
        ("realign_kv_", "step", from_the_left_only),
        ("realign_kv_", "one_column", from_the_left_only),
    ],
)
def test_comparison_rejects(name, case, wrong, dtype):
    op, args, oracle_args = all_ops()[name], make(name, case, dtype), make(name, case, dtype)
    got, oracle = wrong(op.load("torch"), **args), op.load("torch")(**oracle_args)
    if name.endswith("_"):  # an op in place returns its result in its arguments
        got, oracle = args, oracle_args
    with pytest.raises(AssertionError):
        assert_agrees(op, got, oracle, oracle_args)


# What these mistakes get right, so that the tests above reject the order of moves and nothing else.
@pytest.mark.parametrize(
    ("name", "case", "wrong"),
    [("compact_kv_", "down", rising_only), ("realign_kv_", "no_overlap", from_the_left_only)],
)
def test_comparison_takes_what_the_mistake_gets_right(name, case, wrong):
    op, args, oracle_args = all_ops()[name], make(name, case), make(name, case)
    if name == "realign_kv_":  # but for its third row, which is shifted to the left
        assert (args["shifts"].abs() >= args["lengths"]).tolist() == [True, True, False]
    wrong(op.load("torch"), **args)
    op.load("torch")(**oracle_args)
    assert_agrees(op, args, oracle_args, oracle_args)


def test_compiled_extension_is_there():
    # otherwise the sweep would skip every C++ case and still pass
    if os.environ.get("SPECDEC_NO_CPP") == "1":
        pytest.skip("built without C++ on purpose")
    assert BACKENDS["cpp"].why_unavailable() is None


def test_cases_say_what_they_would_catch():
    assert all(case.why for case in CASES.values())
    assert len(CASES) == sum(len(op.cases) for op in OP_CASES.values()), "two cases share a name"
    assert {op.name for op in all_ops().values() if not op.exact} == set(REFERENCES)


# 1: decoding against verification and prefill; 3: prefill in chunks; all: a sequence alone and in a batch.
@each_value_once
@pytest.mark.parametrize("chunk", [1, 3, 10_000], ids=["row_by_row", "threes", "sequence_alone"])
@each_dtype
def test_cpp_attention_rows_are_independent(dtype, chunk):
    device_for(all_ops()["paged_attention"], "cpp")
    attention = all_ops()["paged_attention"].load("cpp")
    batches = [make(op, case, dtype) for op, case in CASES if op == "paged_attention"]
    batches = [args for args in batches if args["batch"].tree_mask is None]  # some rows of a tree are another tree
    for args in [*batches, long_prefill(dtype)]:
        assert_rows_independent(attention, args, chunk)


def attention_in_pieces(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Sum in more pieces the more rows there are: right within rounding, but the batch changes bits."""
    out, starts = torch.empty_like(query), batch.cu_seqlens_q.tolist()
    for b, context in enumerate(batch.seqused_k.tolist()):
        rows = query[starts[b] : starts[b + 1]]
        pages = batch.block_table[b].long()
        key, value = (c[pages].flatten(0, 1)[:context].repeat_interleave(2, 1) for c in kv)
        at = torch.arange(context - len(rows), context)[:, None] - torch.arange(context)
        weights = (torch.einsum("rhd,khd->hrk", rows, key) * params.scale).exp().masked_fill(at < 0, 0)
        pieces = torch.arange(context).tensor_split(1 + len(query) // 50)
        total = sum(torch.einsum("hrk,khd->rhd", weights[:, :, p], value[p]) for p in pieces)
        out[starts[b] : starts[b + 1]] = total / weights.sum(-1).T[:, :, None]
    return out


def test_independence_check_rejects_pieces_by_row_count():
    args = long_prefill(torch.float32)
    torch.testing.assert_close(attention_in_pieces(**args), attention_in_fp64(**args).float())
    for chunk in (1, 3, 10_000):
        with pytest.raises(AssertionError):
            assert_rows_independent(attention_in_pieces, args, chunk)


# Enough rows or logits that the kernels go to work with several threads.
THREADED = [("paged_attention", "verify"), ("verify_chain", "large_vocabulary"), ("linear", "linear_threads")]
THREADED += [("grouped_linear", "experts_vectors_transposed")]


@pytest.mark.parametrize(("name", "case"), THREADED)
def test_number_of_threads_changes_no_bit(name, case):
    device_for(all_ops()[name], "cpp")
    op, args, before = all_ops()[name].load("cpp"), make(name, case), torch.get_num_threads()
    single = op(**args)
    try:
        torch.set_num_threads(2)
        assert same_bits(op(**args), single)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", list(all_ops()["grouped_linear"].implementations))
@pytest.mark.parametrize("case", ["experts_rows", "experts_vectors", "experts_transposed"])
@each_dtype
def test_rows_of_experts_are_independent(backend, case, dtype):
    """A row has the same bits alone, in the other half of the batch, and with all rows in other places."""
    device = device_for(all_ops()["grouped_linear"], backend)
    if backend in INTERPRETED and (case, dtype) != ("experts_vectors", torch.float32):
        pytest.skip("seconds in the interpreter, for the same order of the same sums")
    grouped = all_ops()["grouped_linear"].load(backend)
    args = make_from_seed(CASES["grouped_linear", case], 0, dtype, device)
    rows, expert_ids = args.pop("rows"), args.pop("expert_ids")
    whole = grouped(rows, expert_ids, **args)
    every = torch.arange(len(rows), device=device)
    alone = every[6:7].split(1) if backend in INTERPRETED else every.split(1)
    for own in (*alone, *every.split(5), every.flip(0)):
        assert same_bits(grouped(rows[own], expert_ids[own], **args), whole[own])


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("expert", [-1, 5])
def test_experts_that_are_not_there_are_refused(backend, expert):
    device_for(all_ops()["grouped_linear"], backend)
    args = make("grouped_linear", "experts_rows")
    args["expert_ids"][7, 1] = expert
    with pytest.raises(IndexError, match=f"expert_ids has a {expert}; there are 5 experts"):
        all_ops()["grouped_linear"].load(backend)(**args)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    grid(
        product([b for b in all_ops()["verify_chain"].implementations if b != "torch"], DTYPES.values()),
        keep=lambda pair: pair[0] not in INTERPRETED,
    ),
)
def test_verify_chain_across_blocks(backend, dtype):
    """Chains longer than a kernel's tile of rows; equals, infinities and NaNs on both sides of a block's edge."""
    device = device_for(all_ops()["verify_chain"], backend)
    counts, vocab_size = [70, 40, 1, 33], 2 * 8192 + 5
    g = torch.Generator().manual_seed(0)
    logits = (torch.randint(-40, 40, (sum(counts), vocab_size), generator=g) / 4).to(dtype)
    logits[::3, [17, 8191, 8192]] = 11.0  # the lowest of equals is in an earlier block
    logits[1::3, [16_384, 16_388]] = 12.0  # both are in the last one
    logits[5, [3, 16_387]] = float("inf")
    logits[6] = float("-inf")
    logits[7, 16_388] = logits[8, 0] = float("nan")
    logits[9, :] = float("nan")
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    verify = all_ops()["verify_chain"].load("torch")
    targets = verify(logits, torch.zeros(sum(counts), dtype=torch.int64), cu_seqlens)[0]
    token_ids = targets.roll(1)  # all drafts agree, but for one just before and one on the edge of 16 rows
    token_ids[70 + 32] = token_ids[70 + 40 + 1 + 31] = 5
    want = verify(logits, token_ids, cu_seqlens)
    assert want[1].tolist() == [69, 31, 0, 30]
    inputs = (x.to(device) for x in (logits, token_ids, cu_seqlens))
    assert same_bits(all_ops()["verify_chain"].load(backend)(*inputs), want)


@pytest.mark.parametrize("name", all_ops())
def test_tensors_without_numbers_are_refused(name):
    """Of a tensor on the meta device a kernel would get the address 0."""
    device_for(all_ops()[name], "cpp")
    case = OP_CASES[name].cases[0].name
    args = with_tensors(make(name, case), lambda path, tensor: tensor.to("meta"))
    with pytest.raises(ValueError, match="meta"):
        all_ops()[name].load("cpp")(**args)
