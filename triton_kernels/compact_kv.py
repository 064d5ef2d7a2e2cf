"""``compact_kv_``: move kept KV entries inside each sequence, in place, all layers in one launch.

Bytes: every moved entry is read and written once in each layer, keys and values. A move of an entry to its own position
reads two positions only. Grid: (sequences, planes, slices of an entry), where a plane is the keys or the values of one
layer. A program makes all moves of one sequence for its slice of the entries in one plane.

Why tiles of moves are safe: both lists rise strictly. So a move down (destination < source) can overwrite the source of
an *earlier* move down only, a move up that of a *later* move up only, and neither the source of a move of the other
kind. The kernel makes moves down in rising order and moves up in falling order. Within a tile it loads all sources
before it stores anything, with a barrier between, so that no thread's store overtakes another thread's load. It needs
no barrier after the stores, because no earlier tile has written what the next tile loads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_SLICE_BYTES = 512  # bytes of an entry that one program moves at most: one warp's widest access
_TILE_BYTES = 16384  # bytes that a program holds in registers between loading and storing
_ARRAYS = ("block_table", "cu_moves", "sources", "destinations")
_UNSPECIALISED = (*_ARRAYS, "num_pages", "max_pages")  # these change with the batch and with the contexts


@triton.jit
def _slots(pages, positions, wanted, PAGE_SIZE: tl.constexpr):
    """Return the slots of positions of a sequence in a plane; ``pages`` is its row of the block table."""
    page = tl.load(pages + positions // PAGE_SIZE, mask=wanted, other=0).to(tl.int64)
    return page * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _compact_kernel(
    kv_cache,  # [num_planes, num_pages, PAGE_SIZE, ENTRY], contiguous; ENTRY = num_kv_heads * head_dim
    block_table,  # [B, max_pages] int32
    cu_moves,  # [B + 1] int32
    sources,  # [M] int32
    destinations,  # [M] int32
    num_pages,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
    BLOCK_ENTRY: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    numbers = tl.program_id(2) * BLOCK_ENTRY + tl.arange(0, BLOCK_ENTRY)[None, :]  # [1, BLOCK_ENTRY]
    entries = kv_cache + plane * num_pages * PAGE_SIZE * ENTRY + numbers
    pages = block_table + sequence * max_pages
    start = tl.load(cu_moves + sequence)
    stop = tl.load(cu_moves + sequence + 1)
    num_tiles = tl.cdiv(stop - start, BLOCK_MOVES)
    for i in range(2 * num_tiles):  # first the moves down, tile by tile, then the moves up in falling order
        falling = i >= num_tiles
        tile = tl.where(falling, 2 * num_tiles - 1 - i, i)
        moves = start + tile * BLOCK_MOVES + tl.arange(0, BLOCK_MOVES)[:, None]  # [BLOCK_MOVES, 1]
        source = tl.load(sources + moves, mask=moves < stop, other=0)
        destination = tl.load(destinations + moves, mask=moves < stop, other=0)  # other=0 for both: equal, so no move
        wanted = tl.where(falling, destination > source, destination < source)
        inside = wanted & (numbers < ENTRY)
        read = _slots(pages, source, wanted, PAGE_SIZE) * ENTRY  # [BLOCK_MOVES, 1]
        written = _slots(pages, destination, wanted, PAGE_SIZE) * ENTRY
        content = tl.load(entries + read, mask=inside)
        tl.debug_barrier()
        tl.store(entries + written, content, mask=inside)


def _launch(page_size: int, entry: int, itemsize: int) -> Launch:
    block_entry = triton.next_power_of_2(min(entry, _SLICE_BYTES // itemsize))
    constexprs = {
        "PAGE_SIZE": page_size,
        "ENTRY": entry,
        "BLOCK_MOVES": max(1, min(32, _TILE_BYTES // (block_entry * itemsize))),
        "BLOCK_ENTRY": block_entry,
    }
    return Launch(constexprs, num_warps=4)


def compact_kv_(kv_cache: Tensor, block_table: Tensor, cu_moves: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Launch the kernel; the contract is the oracle's. Positions are not checked: that would wait for the device."""
    num_layers, planes, num_pages, page_size, num_kv_heads, head_dim = kv_cache.shape
    batch_size, max_pages = block_table.shape
    entry = num_kv_heads * head_dim
    if sources.numel() == 0 or kv_cache.numel() == 0:
        return
    launch = _launch(page_size, entry, kv_cache.element_size())
    grid = (batch_size, planes * num_layers, triton.cdiv(entry, launch.constexprs["BLOCK_ENTRY"]))
    _compact_kernel[grid](
        kv_cache, block_table, cu_moves, sources, destinations, num_pages, max_pages, **launch.options
    )


def variants() -> Iterator[Variant]:
    """Yield the compilations for usual models, and for entries whose size is no multiple of a vector."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        signature = {"kv_cache": f"*{TYPE_NAMES[dtype]}"} | dict.fromkeys(_ARRAYS, "*i32")
        signature |= {"num_pages": "i32", "max_pages": "i32"}
        for page_size, entry in ((16, 8 * 128), (4, 3 * 20)):
            launch = _launch(page_size, entry, dtype.itemsize)
            name = f"{TYPE_NAMES[dtype]}_page{page_size}_entry{entry}"
            yield launch.variant(name, _compact_kernel, signature, ("kv_cache",))
