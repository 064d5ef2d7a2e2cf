"""``paged_attention`` in Triton: pieces of the context, bits, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.grids import combinations, grid
from support.op_checks import assert_agrees, assert_rows_independent, same_bits

pytest.importorskip("triton")
from bench.op_cases.paged_attention import PagedShape
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import attention_tile
from specdec_fast.triton_kernels import paged_attention as module
from support.triton_attention import (
    DTYPES,
    ENOUGH,
    OP,
    PIECES,
    RULES,
    SMALL_PIECE,
    SPLIT,
    UNSPLIT,
    attention,
    each_type,
    launches,
    make,
)

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")


# Lengths around the ends of pieces of 512 positions, and one of three pieces.
@pytest.mark.grid
@combinations(enough=ENOUGH, dtype=DTYPES)
def test_contexts_of_several_pieces(dtype, enough, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", enough)
    args = make(PagedShape((1100, 511, 512, 513, 3), (2, 1, 2, 3, 0), head_dim=16), dtype)
    with launches(monkeypatch) as noted:
        got = attention(**args)
    assert [name for name, _, _ in noted] == ["_attention_kernel", "_merge_kernel"][: 1 + (enough == SPLIT)]
    assert noted[0][1][1] == (3 if enough == SPLIT else 1)
    assert_agrees(OP, got, OP.load("torch")(**args), args)


def split_and_not(shape: PagedShape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    results = []
    for enough, kernels in ((SPLIT, 2), (UNSPLIT, 1)):
        monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", enough)
        with launches(monkeypatch) as noted:
            results.append(attention(**make(shape, dtype)))
        assert len(noted) == kernels
    return results[0], results[1]


@pytest.mark.parametrize("shape", grid(PIECES, keep=["tree", "page64_window"]))
@pytest.mark.parametrize("dtype", grid(DTYPES, keep=["fp16"]))
def test_split_or_not_has_the_same_bits(shape, dtype, small_pieces, monkeypatch):
    split, unsplit = split_and_not(shape, dtype, monkeypatch)
    assert same_bits(split, unsplit)
    args = make(shape, dtype)
    assert_agrees(OP, split, OP.load("torch")(**args), args)


def test_comparison_rejects_a_chunk_that_begins_a_row_early(small_pieces, monkeypatch):
    args = make(PIECES["chunk"])
    expected = OP.load("torch")(**args)
    assert_agrees(OP, attention(**args), expected, args)
    monkeypatch.setattr(attention_tile, "first_visible", lambda position, size, _: (position + 1) // size * size)
    with pytest.raises(AssertionError):
        assert_agrees(OP, attention(**args), expected, args)


def test_other_pieces_give_other_bits(small_pieces, monkeypatch):
    # negative control of the comparison above
    split, unsplit = split_and_not(PIECES["no_rows"], torch.float32, monkeypatch)
    monkeypatch.setattr(module, "PIECE", 2 * SMALL_PIECE)
    assert same_bits(split, unsplit)
    assert not same_bits(attention(**make(PIECES["no_rows"])), split)


# The batch fills tall tiles and a part of it is split: decoding, chunks, and a sequence alone against the batch.
@pytest.mark.grid
@combinations(chunk={"row_by_row": 1, "sevens": 7, "sequence_alone": 10_000}, rule=RULES, dtype=DTYPES)
def test_rows_are_independent(chunk, rule, dtype, small_pieces, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)
    shape = PagedShape((90, 130, 65), (9, 6, 1), heads=16, kv_heads=1, head_dim=16, **rule)
    assert_rows_independent(attention, make(shape, dtype), chunk)


def test_independence_rejects_pieces_by_the_batch(monkeypatch):
    def by_the_batch(**args: Any) -> Tensor:
        monkeypatch.setattr(module, "PIECE", SMALL_PIECE * (1 + (len(args["query"]) > 10)))
        return attention(**args)

    with pytest.raises(AssertionError):
        assert_rows_independent(by_the_batch, make(PagedShape((200, 130), (20, 6), head_dim=16)), 7)


@each_type
def test_query_in_any_memory_layout_has_the_same_bits(dtype):
    args = make(PagedShape((40, 9), (6, 3)), dtype)
    query = args["query"]  # [T, heads, D], the heads outermost in memory
    buffer = torch.zeros(query.numel() + 1, dtype=dtype)[1:].view(query.shape)
    misaligned, scattered = buffer.copy_(query), torch.stack([query, query], dim=-1)[..., 0]
    assert misaligned.data_ptr() % 16 != 0
    for other in (query.contiguous(), misaligned, scattered):
        assert same_bits(attention(**{**args, "query": other}), attention(**args))


# Groups that fill no tile evenly, or more than one; head sizes that fill no vector; pages smaller than a tile and odd.
ODD = {
    "group1_dim16_page1": PagedShape((40, 9), (6, 1), heads=2, kv_heads=2, head_dim=16, page_size=1),
    "group3_dim80_page7": PagedShape((40, 9), (6, 1), heads=3, kv_heads=1, head_dim=80, page_size=7),
    "group8_dim96_page5": PagedShape((40, 9), (6, 9), heads=16, kv_heads=2, head_dim=96, page_size=5),
    "group7_dim24_page100": PagedShape((140, 9), (6, 9), heads=14, kv_heads=2, head_dim=24, page_size=100),
    "group71_dim64": PagedShape((40, 9), (3, 1), heads=71, kv_heads=1, head_dim=64),
    "dim256": PagedShape((40, 9), (3, 1), heads=2, kv_heads=1, head_dim=256),
    "dim8": PagedShape((40, 9), (3, 1), heads=2, kv_heads=1, head_dim=8),
    "dim192_values128": PagedShape((40, 9), (3, 1), heads=2, kv_heads=2, head_dim=192, value_dim=128),
    "dim8_values80_sinks": PagedShape((140, 9), (3, 1), heads=6, kv_heads=2, head_dim=8, value_dim=80, sinks=True),
    "large_cap": PagedShape((40, 9), (3, 1), softcap=50.0),
}


@combinations(shape=ODD, dtype=DTYPES)
def test_odd_sizes(shape, dtype):
    args = make(shape, dtype)
    assert_agrees(OP, attention(**args), OP.load("torch")(**args), args)
