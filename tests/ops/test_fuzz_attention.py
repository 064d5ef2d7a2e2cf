"""``paged_attention`` on random shapes: backends against the oracle, rows against other batches."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.ops import all_ops
from support.fuzzing import fuzz, memory
from support.op_cases import CPU, attention_by_hand, attention_in_fp64, changed, each_case, make, positions_seen
from support.op_checks import device_for, largest_of, same_bits
from support.strategies import CPP, TRITON, CallSizes, generator
from support.strategies_attention import LARGEST_TERM_FIRST, AttentionCall, attention_calls

OP = all_ops()["paged_attention"]
COMPILED = OP.why_unavailable("cpp") is None
VERSIONS = importlib.import_module("specdec_fast._C").attention_versions() if COMPILED else ["none"]

Attention = Callable[..., Tensor]


def in_cpp(version: str) -> Attention:
    """The C++ op as it was compiled for one instruction set; skips where it was not compiled."""
    device_for(OP, "cpp")
    extension, attention = importlib.import_module("specdec_fast._C"), OP.load("cpp")

    def run(**args: Any) -> Tensor:
        extension.choose_attention_version(version)
        try:
            return attention(**args)
        finally:
            extension.choose_attention_version(VERSIONS[-1])

    return run


@each_case("paged_attention")
def test_fp64_attention_is_the_one_by_hand(case):
    args = make("paged_attention", case)
    got, truth = attention_in_fp64(**args), attention_by_hand(**args)
    terms = args["batch"].max_seqlen_k + args["query"].shape[2]
    assert largest_of(got - truth) <= terms * torch.finfo(torch.float64).eps * largest_of(truth)


SAMPLES = 16


def assert_near_oracle(attention: Attention, call: AttentionCall, device: torch.device) -> None:
    """Within twice the oracle's own error against fp64 plus one rounding unit, relative to the largest output.

    By chance the oracle may be exact on these numbers, so its error is the largest of those on SAMPLES calls that
    differ in the numbers only.
    """
    args, before = call.make(device), call.make(device)
    got, truth = attention(**args), attention_in_fp64(**before)
    assert same_bits(memory(args), memory(before)), "the arguments were changed"
    assert (got.dtype, got.shape) == (before["query"].dtype, truth.shape)
    error, bound = largest_of(got.cpu() - truth) / (largest_of(truth) or 1.0), torch.finfo(got.dtype).eps
    for sample in range(SAMPLES):
        if error <= bound:
            break  # another sample can only raise the bound
        args = replace(call, seed=call.seed + sample).make(device)
        truth = attention_in_fp64(**args)
        oracle_error = largest_of(OP.load("torch")(**args).cpu() - truth) / (largest_of(truth) or 1.0)
        bound = max(bound, 2 * oracle_error + torch.finfo(got.dtype).eps)
    assert error <= bound, f"relative error {error:.3g}, allowed {bound:.3g}"


# Batches of none to 5 sequences, with none to 9 rows each or those of a prefill (C++ takes 16 at once); contexts up to
# three tiles of 64, most of them at the end of a page or a tile or one beside it; 1 to 8 heads for each of 1 to 3.
@fuzz(25)
@example(call=LARGEST_TERM_FIRST, version=VERSIONS[0])
@given(call=attention_calls(CPP), version=st.sampled_from(VERSIONS))
def test_attention_in_cpp(call, version):
    assert_near_oracle(in_cpp(version), call, CPU)


@pytest.mark.grid
@fuzz(120)
@given(call=attention_calls(CPP), version=st.sampled_from(VERSIONS))
def test_attention_in_cpp_at_length(call, version):
    assert_near_oracle(in_cpp(version), call, CPU)


# The same over trees: from chains (reach 0) to bushes and forests, of more rows than a word of the mask has bits.
@fuzz(18)
@given(call=attention_calls(CPP, trees=True), version=st.sampled_from(VERSIONS))
def test_tree_attention_in_cpp(call, version):
    assert_near_oracle(in_cpp(version), call, CPU)


@pytest.mark.grid
@fuzz(100)
@given(call=attention_calls(CPP, trees=True), version=st.sampled_from(VERSIONS))
def test_tree_attention_in_cpp_at_length(call, version):
    assert_near_oracle(in_cpp(version), call, CPU)


# Smaller, because it is interpreted; the context passes one tile of 64.
@pytest.mark.grid
@fuzz(2)
@given(call=attention_calls(TRITON) | attention_calls(TRITON, trees=True))
def test_attention_in_triton(call):
    device = device_for(OP, "triton")
    assert_near_oracle(OP.load("triton"), call, device)


@pytest.mark.grid
@pytest.mark.parametrize("trees", [False, True])
@fuzz(20)
@given(data=st.data())
def test_attention_in_triton_at_length(trees, data):
    device = device_for(OP, "triton")
    assert_near_oracle(OP.load("triton"), data.draw(attention_calls(TRITON, trees=trees)), device)


def unwritten(**args: Any) -> Tensor:
    """Leave one element unwritten."""
    right, out = OP.load("torch")(**args), torch.empty(args["query"].shape, dtype=args["query"].dtype)
    out.view(-1)[1:] = right.reshape(-1)[1:]
    return out


def narrowed(**args: Any) -> Tensor:
    """Attend over keys and values of a narrower type."""
    return OP.load("torch")(**{**args, "kv": tuple(cache.half().float() for cache in args["kv"])})


def window_too_short(**args: Any) -> Tensor:
    return OP.load("torch")(**changed(args, "params.sliding_window", lambda window: window - 1))


def window_too_long(**args: Any) -> Tensor:
    """See an entry that no row may see; it is NaN."""
    return OP.load("torch")(**changed(args, "params.sliding_window", lambda window: window + 1))


def chunk_too_short(**args: Any) -> Tensor:
    return OP.load("torch")(**changed(args, "params.attention_chunk", lambda chunk: chunk - 1))


def chunk_too_long(**args: Any) -> Tensor:
    return OP.load("torch")(**changed(args, "params.attention_chunk", lambda chunk: chunk + 1))


SMALL = AttentionCall(
    sequences=((40, 3), (0, 0), (33, 0), (64, 9)),
    page_size=16,
    kv_heads=2,
    group=2,
    head_dim=20,
    params=AttentionParams(20**-0.5, sliding_window=8),
    reach=None,
    layout="transposed",
    spare=1,
    dtype=torch.float32,
    seed=0,
)


IN_CHUNKS = replace(SMALL, params=AttentionParams(20**-0.5, attention_chunk=8))
WRONG = [(unwritten, SMALL), (narrowed, SMALL), (window_too_short, SMALL), (window_too_long, SMALL)]
WRONG += [(chunk_too_short, IN_CHUNKS), (chunk_too_long, IN_CHUNKS)]


@pytest.mark.parametrize(("wrong", "call"), WRONG)
def test_fuzzed_comparison_rejects(wrong, call):
    assert_near_oracle(OP.load("torch"), call, CPU)
    with pytest.raises(AssertionError, match="relative error"):
        assert_near_oracle(wrong, call, CPU)


def assert_chunks_have_the_same_bits(attention: Attention, call: AttentionCall) -> None:
    """Cut every sequence's rows anywhere, shuffle the chunks, and run them as the sequences of two other batches."""
    args, g = call.make(CPU), generator(call.seed)
    whole, batch = attention(**args), args["batch"]
    starts, chunks = batch.cu_seqlens_q.tolist(), []
    for b, (context, rows) in enumerate(call.sequences):
        cuts = sorted({0, rows, *torch.randint(rows + 1, (2,), generator=g).tolist()})
        chunks += [(b, starts[b] + i, starts[b] + j, context - rows + j) for i, j in pairwise(cuts)]
    chunks = [chunks[i] for i in torch.randperm(len(chunks), generator=g)]
    for part in (chunks[::2], chunks[1::2]):
        lengths, seen = [j - i for _, i, j, _ in part], [chunk[3] for chunk in part]
        rows_of = torch.tensor([row for _, i, j, _ in part for row in range(i, j)], dtype=torch.long)
        regrouped = PagedBatch(
            block_table=batch.block_table[[chunk[0] for chunk in part]],
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
            seqused_k=torch.tensor(seen, dtype=torch.int32),
            max_seqlen_q=max(lengths, default=0),
            max_seqlen_k=max(seen, default=0),
        )
        assert same_bits(attention(**{**args, "query": args["query"][rows_of], "batch": regrouped}), whole[rows_of])


# Shapes as above: a cut may fall anywhere, in a page, a tile or a group of rows that are computed together.
@fuzz(30)
@given(call=attention_calls(CPP), version=st.sampled_from(VERSIONS))
def test_cpp_attention_of_any_chunks_has_the_same_bits(call, version):
    assert_chunks_have_the_same_bits(in_cpp(version), call)


@pytest.mark.grid
@fuzz(150)
@given(call=attention_calls(CPP), version=st.sampled_from(VERSIONS))
def test_cpp_attention_of_any_chunks_has_the_same_bits_at_length(call, version):
    assert_chunks_have_the_same_bits(in_cpp(version), call)


def test_chunk_check_rejects_bits_that_depend_on_the_batch():
    def attention(query: Tensor, **args: Any) -> Tensor:
        return OP.load("torch")(query, **args) * (1 + len(query) * torch.finfo(torch.float32).eps)

    with pytest.raises(AssertionError, match="same_bits"):
        assert_chunks_have_the_same_bits(attention, SMALL)


def assert_nan_reaches_only_rows_that_see_it(attention: Attention, call: AttentionCall, device: torch.device) -> None:
    """Set one number of an entry that some of its sequence's rows see to NaN: all other rows keep their bits."""
    g = generator(call.seed)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=g))

    args, spoiled = call.make(device), call.make(device)
    with_rows = [b for b, (_, rows) in enumerate(call.sequences) if rows]
    b = with_rows[below(len(with_rows))]
    context, rows = call.sequences[b]
    position = context - 1 - below(context - call.first_seen(context, rows))
    kv_head, which = below(call.kv_heads), below(2)
    d = below(args["kv"][which].shape[3])
    page = int(args["batch"].block_table[b, position // call.page_size])
    spoiled["kv"][which][page, position % call.page_size, kv_head, d] = math.nan
    start, stop = args["batch"].cu_seqlens_q[b : b + 2].tolist()
    see = torch.zeros(len(args["query"]), dtype=torch.bool)
    for row in range(start, stop):
        see[row] = position in positions_seen(args["batch"], b, row, call.params)
    before, after = attention(**args), attention(**spoiled)
    assert same_bits(after[~see], before[~see])
    of_head = after[see].unflatten(1, (call.kv_heads, call.group))[:, kv_head]
    assert (
        (of_head if which == 0 else of_head[..., d]).isnan().all()
    )  # a NaN in a key makes the weights of all columns NaN


def any_calls(limits: CallSizes) -> st.SearchStrategy[AttentionCall]:
    return (attention_calls(limits) | attention_calls(limits, trees=True)).filter(AttentionCall.has_rows)


# The same in PyTorch, whose softmax takes a row of NaN scores for one that sees nothing.
@fuzz(15)
@given(call=any_calls(CPP))
def test_nan_in_torch_reaches_only_rows_that_see_it(call):
    assert_nan_reaches_only_rows_that_see_it(OP.load("torch"), call, CPU)


# Shapes as above, chains and trees: a weight of 0 would still spread a NaN to rows of the same tile.
@fuzz(20)
@given(call=any_calls(CPP), version=st.sampled_from(VERSIONS))
def test_nan_in_cpp_reaches_only_rows_that_see_it(call, version):
    assert_nan_reaches_only_rows_that_see_it(in_cpp(version), call, CPU)


@pytest.mark.grid
@fuzz(120)
@given(call=any_calls(CPP), version=st.sampled_from(VERSIONS))
def test_nan_in_cpp_reaches_only_rows_that_see_it_at_length(call, version):
    assert_nan_reaches_only_rows_that_see_it(in_cpp(version), call, CPU)


@pytest.mark.grid
@fuzz(2)
@given(call=any_calls(TRITON))
def test_nan_in_triton_reaches_only_rows_that_see_it(call):
    device = device_for(OP, "triton")
    assert_nan_reaches_only_rows_that_see_it(OP.load("triton"), call, device)


@pytest.mark.grid
@fuzz(25)
@given(call=any_calls(TRITON))
def test_nan_in_triton_reaches_only_rows_that_see_it_at_length(call):
    device = device_for(OP, "triton")
    assert_nan_reaches_only_rows_that_see_it(OP.load("triton"), call, device)


def test_nan_check_rejects_weights_of_zero():
    def attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
        out = attention_in_fp64(query, kv, batch, params)
        for b, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            if start < stop:
                last = int(batch.seqused_k[b]) - 1
                page = int(batch.block_table[b, last // kv[0].shape[1]])
                out[start:stop] += 0 * (kv[0] + kv[1])[page, last % kv[0].shape[1]].sum()
        return out

    call = replace(SMALL, seed=58)  # its NaN is in the last entry, which earlier rows do not see
    assert_nan_reaches_only_rows_that_see_it(attention_in_fp64, call, CPU)
    with pytest.raises(AssertionError, match="same_bits"):
        assert_nan_reaches_only_rows_that_see_it(attention, call, CPU)
