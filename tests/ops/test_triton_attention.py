"""``paged_attention`` in Triton: pieces of the context, bits, entries that are not finite, memory that is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.grids import diagonal
from support.op_cases import CPU, attention_by_hand, changed, positions_seen
from support.op_checks import assert_agrees, assert_rows_independent, same_bits

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from specdec_fast.ops import all_ops
from specdec_fast.ops.paged_attention import _make, _Shape
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels import attention_tile
from specdec_fast.triton_kernels import paged_attention as module
from support.source_tree import ROOT

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU's run is bench.gpu; this is about the interpreter")
OP = all_ops()["paged_attention"]
# fp16 first, which is faster here: its tiles are larger.
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
SMALL_PIECE = 64  # of one tile of KV in fp16 and four in fp32: many pieces in short contexts
UNSPLIT, SPLIT = 0, 1 << 30  # values of _ENOUGH_PROGRAMS
ENOUGH = {"split": SPLIT, "unsplit": UNSPLIT}
WINDOWS = {"full": None, "window": 70}


def attention(**args: Any) -> Tensor:
    return OP.load("triton")(**args)


def make(shape: _Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    return _make(shape, torch.Generator().manual_seed(seed), dtype, CPU)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", SMALL_PIECE)


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], dict[str, Any]]]]:
    """Note what is launched: the kernel, the grid and the compile-time options."""
    noted: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)
            self.arg_names = self.kernel.arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                noted.append((self.name, grid, options))
                self.kernel[grid](*args, **options)

            return launch

    with monkeypatch.context() as patch:
        for name in ("_attention_kernel", "_merge_kernel"):
            patch.setattr(module, name, Noted(name))
        yield noted


# Lengths around the ends of pieces of 512 positions, and one of three pieces.
@diagonal(enough=ENOUGH, dtype=DTYPES)
def test_contexts_of_several_pieces(dtype, enough, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", enough)
    args = make(_Shape((1100, 511, 512, 513, 3), (2, 1, 2, 3, 0), head_dim=16), dtype)
    with launches(monkeypatch) as noted:
        got = attention(**args)
    assert [name for name, _, _ in noted] == ["_attention_kernel", "_merge_kernel"][: 1 + (enough == SPLIT)]
    assert noted[0][1][1] == (3 if enough == SPLIT else 1)
    assert_agrees(OP, got, OP.load("torch")(**args), args)


PIECES = {
    "chain": _Shape((200, 64, 65), (6, 1, 40), head_dim=16),
    "window": _Shape((200, 64, 130), (6, 3, 20), heads=2, kv_heads=1, head_dim=16, sliding_window=70),
    "softcap": _Shape((130, 65), (6, 1), head_dim=16, softcap=2.0),
    "tree": _Shape((150, 64, 40), (9, 3, 6), heads=2, kv_heads=1, head_dim=16, tree=True),
    "tree_window": _Shape((150, 70), (5, 12), heads=2, kv_heads=1, head_dim=16, tree=True, sliding_window=64),
    "sinks": _Shape((200, 64, 65), (6, 1, 40), head_dim=16, sinks=True),
    "narrow_values": _Shape((200, 64, 65), (6, 1, 40), head_dim=24, value_dim=16),
    "no_rows": _Shape((130, 90, 0), (3, 0, 0), head_dim=16),
}


def split_and_not(shape: _Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    results = []
    for enough, kernels in ((SPLIT, 2), (UNSPLIT, 1)):
        monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", enough)
        with launches(monkeypatch) as noted:
            results.append(attention(**make(shape, dtype)))
        assert len(noted) == kernels
    return results[0], results[1]


@diagonal(shape=PIECES, dtype=DTYPES)
def test_split_or_not_has_the_same_bits(shape, dtype, small_pieces, monkeypatch):
    split, unsplit = split_and_not(shape, dtype, monkeypatch)
    assert same_bits(split, unsplit)
    args = make(shape, dtype)
    assert_agrees(OP, split, OP.load("torch")(**args), args)


def test_other_pieces_give_other_bits(small_pieces, monkeypatch):
    # negative control of the comparison above
    split, unsplit = split_and_not(PIECES["chain"], torch.float32, monkeypatch)
    monkeypatch.setattr(module, "PIECE", 2 * SMALL_PIECE)
    assert same_bits(split, unsplit)
    assert not same_bits(attention(**make(PIECES["chain"])), split)


# The batch is not split (6 programs) and a part of it is (2): decoding, chunks, and a sequence alone against the batch.
@diagonal(chunk={"row_by_row": 1, "sevens": 7, "sequence_alone": 10_000}, window=WINDOWS, dtype=DTYPES)
def test_rows_are_independent(chunk, window, dtype, small_pieces, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 6)
    shape = _Shape((90, 130, 65), (9, 6, 1), heads=2, head_dim=16, sliding_window=window)
    assert_rows_independent(attention, make(shape, dtype), chunk)


def test_independence_rejects_pieces_by_the_batch(monkeypatch):
    def by_the_batch(**args: Any) -> Tensor:
        monkeypatch.setattr(module, "PIECE", SMALL_PIECE * (1 + (len(args["query"]) > 10)))
        return attention(**args)

    with pytest.raises(AssertionError):
        assert_rows_independent(by_the_batch, make(_Shape((200, 130), (20, 6), head_dim=16)), 7)


def test_nothing_of_the_batch_is_compiled_in(monkeypatch):
    wide = make(_Shape((40, 9, 3), (6, 1, 3)), torch.float16)
    sliding = make(_Shape((700,), (33,), sliding_window=5), torch.float16)
    with launches(monkeypatch) as noted:
        for args in (wide, sliding):
            attention(**args)
    assert len({str(options) for name, _, options in noted if name == "_attention_kernel"}) == 1
    sizes = {"stride_query_row", "stride_query_head", "max_pages", "max_tiles", "num_splits", "path_width", "window"}
    assert sizes <= set(module._UNSPECIALISED), "an argument that is specialised by its value makes another kernel"
    assert {"block_table", "cu_seqlens_q", "seqused_k", "paths"} <= set(module._UNSPECIALISED)


@pytest.mark.parametrize(
    "shape",
    [
        _Shape((600,), (3,), heads=4, kv_heads=1, head_dim=128),
        _Shape((40,), (2,), heads=8, kv_heads=1, head_dim=64, tree=True),
        _Shape((600,), (2,), heads=8, kv_heads=1, head_dim=64, sinks=True),
        _Shape((40,), (2,), heads=2, kv_heads=2, head_dim=192, value_dim=128),
    ],
    ids=["split", "tree", "sinks", "narrow_values"],
)
def test_launches_are_those_compiled_ahead_of_time(shape, monkeypatch):
    known = [(v.kernel, v.constexprs, v.num_warps, v.num_stages, v.max_registers) for v in module.variants()]
    kernels = {name: getattr(module, name) for name in ("_attention_kernel", "_merge_kernel")}
    with launches(monkeypatch) as noted:
        attention(**make(shape, torch.float16))
    assert noted
    for name, _, options in noted:
        asked = [options.pop(key, None) for key in ("num_warps", "num_stages", "maxnreg")]
        assert (kernels[name], options, *asked) in known


@each_type
def test_query_in_any_memory_layout_has_the_same_bits(dtype):
    args = make(_Shape((40, 9), (6, 3)), dtype)
    query = args["query"]  # [T, heads, D], the heads outermost in memory
    buffer = torch.zeros(query.numel() + 1, dtype=dtype)[1:].view(query.shape)
    misaligned, scattered = buffer.copy_(query), torch.stack([query, query], dim=-1)[..., 0]
    assert misaligned.data_ptr() % 16 != 0
    for other in (query.contiguous(), misaligned, scattered):
        assert same_bits(attention(**{**args, "query": other}), attention(**args))


# Groups that fill no tile evenly, or more than one; head sizes that fill no vector; pages smaller than a tile and odd.
ODD = {
    "group1_dim16_page1": _Shape((40, 9), (6, 1), heads=2, kv_heads=2, head_dim=16, page_size=1),
    "group3_dim80_page7": _Shape((40, 9), (6, 1), heads=3, kv_heads=1, head_dim=80, page_size=7),
    "group8_dim96_page5": _Shape((40, 9), (6, 9), heads=16, kv_heads=2, head_dim=96, page_size=5),
    "group7_dim24_page100": _Shape((140, 9), (6, 9), heads=14, kv_heads=2, head_dim=24, page_size=100),
    "group71_dim64": _Shape((40, 9), (3, 1), heads=71, kv_heads=1, head_dim=64),
    "dim256": _Shape((40, 9), (3, 1), heads=2, kv_heads=1, head_dim=256),
    "dim8": _Shape((40, 9), (3, 1), heads=2, kv_heads=1, head_dim=8),
    "dim192_values128": _Shape((40, 9), (3, 1), heads=2, kv_heads=2, head_dim=192, value_dim=128),
    "dim8_values80_sinks": _Shape((140, 9), (3, 1), heads=6, kv_heads=2, head_dim=8, value_dim=80, sinks=True),
    "large_cap": _Shape((40, 9), (3, 1), softcap=50.0),
}


@diagonal(shape=ODD, dtype=DTYPES)
def test_odd_sizes(shape, dtype):
    args = make(shape, dtype)
    assert_agrees(OP, attention(**args), OP.load("torch")(**args), args)


# An entry of the new rows, seen by some of them; and with a window one that only the first rows still see.
ENTRIES = {
    "chain": (_Shape((90, 20), (9, 3), heads=2, head_dim=16), 85),
    "tree": (_Shape((90, 20), (9, 3), heads=2, head_dim=16, tree=True), 82),
    "window": (_Shape((90, 20), (9, 3), heads=2, head_dim=16, sliding_window=30), 54),
    "seen_by_all": (_Shape((90, 20), (9, 3), heads=2, head_dim=16), 3),
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
    shape: _Shape, position: int, which: int, value: float, dtype: torch.dtype
) -> None:
    args = with_number(make(shape, dtype), position, which, value)
    before, after = attention(**make(shape, dtype)), attention(**args)
    batch, group = args["batch"], shape.heads // shape.kv_heads
    start, stop = batch.cu_seqlens_q[:2].tolist()
    sees = torch.zeros(len(after), dtype=torch.bool)
    for row in range(start, stop):
        sees[row] = position in positions_seen(batch, 0, row, shape.sliding_window)
    assert sees[start:stop].any()
    assert same_bits(after[~sees], before[~sees])
    assert same_bits(after[:, group:], before[:, group:]), "another KV head"
    wanted = attention_by_hand(**args)[sees, :group].isfinite().all(dim=-1)  # a score of -inf has the weight 0
    assert torch.equal(after[sees, :group].isfinite().all(dim=-1), wanted)


@diagonal(name=list(ENTRIES), number=NOT_FINITE, dtype=DTYPES)
def test_not_finite_reaches_only_rows_that_see_it(name, number, dtype, small_pieces):
    assert_reaches_only_rows_that_see_it(*ENTRIES[name], *number, dtype)


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


@diagonal(name=list(PIECES), dtype=DTYPES)
def test_reads_what_is_seen_and_no_more(name, dtype, small_pieces, monkeypatch):
    shape = PIECES[name]
    args = make(shape, dtype)
    tile = module.launch_config(dtype, shape.head_dim, shape.head_dim, 2).constexprs["BLOCK_N"]
    slots, places = read_by(args, monkeypatch)
    table, wanted, allowed, known = args["batch"].block_table, set(), set(), set()
    for b, (context, rows) in enumerate(zip(shape.contexts, shape.rows, strict=True)):
        first = max(0, context - rows - (shape.sliding_window or context) + 1)
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


LAYOUTS = r"""
import re, sys
from bench.aot import TARGETS, compile_variant
from specdec_fast.triton_kernels.paged_attention import variants
chosen = [variant for variant in variants() if variant.name in sys.argv[1:]]
for name in ("sm_80", "sm_90"):
    for variant in chosen:
        code = compile_variant(variant, TARGETS[name]).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
        block_m, block_n = variant.constexprs["BLOCK_M"], variant.constexprs["BLOCK_N"]
        tile = rf"\}}\) : \(tensor<{block_m}x{block_n}xf32, (#\w+)>\)"
        product = r"= tt.dot .*-> tensor<(\w+, #\w+)>"
        summed = [layouts[alias].replace(" ", "") for alias in re.findall(tile, code)]
        products = [found.split(", ") for found in re.findall(product, code)]
        print(name, *summed, *(f"{shape}{layouts[alias]}".replace(" ", "") for shape, alias in products))
"""


def test_sums_over_a_tile_have_one_order():
    """Whether a tile is partly hidden, in a tree or not, the compiler adds up its weights in the same layout.

    The interpreter cannot show that; the order of a sum on a GPU is that of its layout.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = ("fp16_dim128_group4", "fp16_dim128_group4_tree")
    command = [sys.executable, "-c", LAYOUTS, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4, done.stderr
    for chain, tree in (lines[:2], lines[2:]):
        assert chain == tree, "a tree's rows have the bits of chains"
        _, *layouts = chain
        assert len(layouts) == 8, "a maximum, a sum and two products, of tiles that all rows see and of others"
        assert len(set(layouts[:4])) == 1
        assert layouts[4:6] == layouts[6:]


# Graphs are launched with the bounds of their bucket, and with places for sequences that have no rows.


@diagonal(enough=ENOUGH, window=WINDOWS, dtype=DTYPES)
def test_larger_bounds_change_no_bit_and_nothing_more_is_read(dtype, enough, window, small_pieces, monkeypatch):
    args = make(_Shape((200, 65, 3), (2, 1, 3), head_dim=16, sliding_window=window), dtype)
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
