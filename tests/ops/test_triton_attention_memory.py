"""``paged_attention`` in Triton: what memory it reads, and which rows a number that is not finite reaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.grids import grid
from support.op_cases import attention_by_hand, changed, positions_seen
from support.op_checks import same_bits

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from bench.op_cases.paged_attention import PagedShape
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import attention_tile
from specdec_fast.triton_kernels import paged_attention as module
from support.triton_attention import DTYPES, ENOUGH, OP, PIECES, UNSPLIT, WINDOWS, attention, launches, make

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")

# An entry of the new rows, seen by some of them; and with a window one that only the first rows still see.
ENTRIES = {
    "chain": (PagedShape((90, 20), (9, 3), heads=2, head_dim=16), 85),
    "tree": (PagedShape((90, 20), (9, 3), heads=2, head_dim=16, tree=True), 82),
    "window": (PagedShape((90, 20), (9, 3), heads=2, head_dim=16, sliding_window=30), 54),
    "chunk": (PagedShape((90, 20), (9, 3), heads=2, head_dim=16, attention_chunk=28), 82),
    "seen_by_all": (PagedShape((90, 20), (9, 3), heads=2, head_dim=16), 3),
}
# Whose number it is, that of a key (0) or a value (1), and what it becomes.
NOT_FINITE = {
    "key-nan": (0, float("nan")), "value-nan": (1, float("nan")),
    "value-inf": (1, float("inf")), "key-inf": (0, float("inf")),
}  # fmt: skip


def with_number(args: dict[str, Any], position: int, which: int, value: float) -> dict[str, Any]:
    """Change one number of an entry of the first sequence and the first KV head."""
    page_size = args["kv"][0].shape[1]
    page = int(args["batch"].block_table[0, position // page_size])
    args["kv"][which][page, position % page_size, 0, 5] = value
    return args


def assert_reaches_only_rows_that_see_it(
    shape: PagedShape, position: int, which: int, value: float, dtype: torch.dtype
) -> None:
    args = with_number(make(shape, dtype), position, which, value)
    before, after = attention(**make(shape, dtype)), attention(**args)
    batch, group = args["batch"], shape.heads // shape.kv_heads
    start, stop = batch.cu_seqlens_q[:2].tolist()
    sees = torch.zeros(len(after), dtype=torch.bool)
    for row in range(start, stop):
        sees[row] = position in positions_seen(batch, 0, row, args["params"])
    assert sees[start:stop].any()
    assert same_bits(after[~sees], before[~sees])
    assert same_bits(after[:, group:], before[:, group:]), "another KV head"
    wanted = attention_by_hand(**args)[sees, :group].isfinite().all(dim=-1)  # a score of -inf has the weight 0
    assert torch.equal(after[sees, :group].isfinite().all(dim=-1), wanted)


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    grid(
        product(ENTRIES, NOT_FINITE, DTYPES),
        keep=[("tree", "key-nan", "fp16"), ("window", "value-inf", "fp32"), ("chunk", "key-inf", "fp16")],
    ),
)
def test_not_finite_reaches_only_rows_that_see_it(name, number, dtype, small_pieces):
    assert_reaches_only_rows_that_see_it(*ENTRIES[name], *NOT_FINITE[number], DTYPES[dtype])


def test_not_finite_check_rejects_weights_of_zero(monkeypatch):
    monkeypatch.setattr(attention_tile, "finite", lambda x: tl.full(x.shape, True, tl.int1))
    assert_reaches_only_rows_that_see_it(*ENTRIES["seen_by_all"], 1, float("nan"), torch.float32)
    with pytest.raises(AssertionError, match="same_bits"):
        assert_reaches_only_rows_that_see_it(*ENTRIES["chain"], 1, float("nan"), torch.float32)


@contextmanager
def addresses_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[np.ndarray]]:
    """Note the addresses of all numbers that a kernel loads."""
    read: list[np.ndarray] = []
    load = InterpreterBuilder.create_masked_load

    def noting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        read.append(np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]))
        return load(self, pointers, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", noting)
        yield read


def entries_read(tensor: Tensor, read: list[np.ndarray], size: int) -> set[int]:
    """Which entries of ``size`` numbers each were read of a contiguous tensor."""
    offsets = np.concatenate(read).astype(np.int64) - tensor.data_ptr()
    inside = offsets[(offsets >= 0) & (offsets < tensor.numel() * tensor.element_size())]
    return set((inside // (size * tensor.element_size())).tolist())


def read_by(args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """Slots of the caches and places of the block table that are read."""
    with addresses_read(monkeypatch) as read:
        attention(**args)
    slots = [entries_read(cache, read, cache[0, 0].numel()) for cache in args["kv"]]
    assert slots[0] == slots[1]
    return slots[0], entries_read(args["batch"].block_table, read, 1)


@pytest.mark.parametrize("name", grid(list(PIECES), keep=["tree_chunk"]))
@pytest.mark.parametrize("dtype", grid(DTYPES, keep=["fp16"]))
def test_reads_what_is_seen_and_no_more(name, dtype, small_pieces, monkeypatch):
    shape = PIECES[name]
    args = make(shape, dtype)
    tile = module.launch_config(dtype, shape.head_dim, shape.head_dim, 2).constexprs["BLOCK_N"]
    slots, places = read_by(args, monkeypatch)
    table, wanted, allowed, known = args["batch"].block_table, set(), set(), set()
    for b, (context, rows) in enumerate(zip(shape.contexts, shape.rows, strict=True)):
        chunk = shape.attention_chunk or context + 1
        first = max((context - rows) // chunk * chunk, context - rows - (shape.sliding_window or context) + 1)
        for position in range(first // tile * tile if rows else context, context):
            place = position // shape.page_size
            slot = int(table[b, place]) * shape.page_size + position % shape.page_size
            known.add(b * table.shape[1] + place)
            allowed.add(slot)
            wanted |= {slot} if position >= first else set()
    assert wanted <= slots <= allowed
    assert places <= known


def test_reading_check_sees_another_window(small_pieces, monkeypatch):
    args = make(PIECES["window"])
    wider = changed(args, "params.sliding_window", lambda window: window + 40)
    assert read_by(args, monkeypatch)[0] < read_by(wider, monkeypatch)[0]


@pytest.mark.grid
def test_reading_check_sees_another_chunk(small_pieces, monkeypatch):
    args = make(PIECES["chunk"])
    wider = changed(args, "params.attention_chunk", lambda chunk: 4 * chunk)
    assert read_by(args, monkeypatch)[0] < read_by(wider, monkeypatch)[0]


# Graphs are launched with the bounds of their bucket, and with places for sequences that have no rows.
@pytest.mark.parametrize("enough", grid(ENOUGH, keep=["split"]))
@pytest.mark.parametrize("window", grid(WINDOWS, keep=["window"]))
@pytest.mark.parametrize("dtype", grid(DTYPES, keep=["fp16"]))
def test_larger_bounds_change_no_bit_and_nothing_more_is_read(dtype, enough, window, small_pieces, monkeypatch):
    args = make(PagedShape((200, 65, 3), (2, 1, 3), head_dim=16, sliding_window=window), dtype)
    batch = args["batch"]
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", enough)
    expected = attention(**args)
    count, width = batch.block_table.shape
    table = torch.full((count + 2, 4 * width), 2**30, dtype=torch.int32)  # pages outside memory: a read would crash
    for b, used in enumerate(batch.seqused_k.tolist()):
        pages = -(-used // args["kv"][0].shape[1])
        table[b, :pages] = batch.block_table[b, :pages]
    last = batch.cu_seqlens_q[-1:]
    bucket = replace(
        batch,
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, last, last]),
        seqused_k=torch.cat([batch.seqused_k, torch.zeros(2, dtype=torch.int32)]),
        block_table=table,
        max_seqlen_q=40,
        max_seqlen_k=4 * width * args["kv"][0].shape[1],
    )
    with launches(monkeypatch) as noted:
        assert torch.equal(OP.load("triton", check=False)(**{**args, "batch": bucket}), expected)
    assert noted[0][1][1] > (3 if window is None else 1) or enough == UNSPLIT
