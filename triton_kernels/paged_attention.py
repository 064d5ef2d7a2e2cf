"""``paged_attention``: causal attention of ragged query rows over a paged KV cache.

The (query row, head of the group) pairs of a tile share what they read of one KV head. All pairs of a verify step make
one tile, or few. Bytes: every KV entry that a tile's rows see is read once, ``num_kv_heads * (head_dim + value_dim) *
itemsize`` for all heads; queries and output once. If contexts are split, ``8 * value_dim`` and 16 bytes more per pair
and piece.
Grid: (sequences x tiles x KV heads, pieces of the context or 1); and if split (sequences x groups of pairs x KV heads).

A row's bits depend on its own context alone. Tiles of KV begin at absolute positions. A piece is a fixed number of
positions; its softmax begins empty, and the pieces are merged in order. In decoding and verification each piece has a
program of its own, and a second kernel merges them from a buffer. If there are enough tiles of prompts to fill the
device, they are twice as tall, and one program computes and merges all pieces of a tile. Neither that choice nor the
number of rows in a tile changes a bit: a row lies in one warp's registers in both forms, which add up in the same order
(``make gpu-check`` compares them), and no argument of the batch is specialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.triton_kernels.attention_tile import BATCH_NUMBERS, merge_pieces, state_of_tile, store_tile, tile_of
from specdec_fast.triton_kernels.attention_tile import UNSPECIALISED as _UNSPECIALISED
from specdec_fast.triton_kernels.attention_tree import path_variants, paths_of
from specdec_fast.triton_kernels.device import properties
from specdec_fast.triton_kernels.overlap import overlaps, wait
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

PIECE = 512  # positions; it defines a row's bits, as the sizes of tiles do
_MERGED_PAIRS = 8  # per program of the second kernel; divides every BLOCK_M
_NO_WINDOW = 1 << 30  # more positions than any context has, and far from the limits of int32
_ENOUGH_PROGRAMS = 256  # tall tiles, about two per multiprocessor of a large device
_LARGEST_BUFFER = 1 << 28  # bytes of partial results, so that int32 can index them
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _attention_kernel(
    query,  # [T, num_heads, HEAD_DIM], the last axis contiguous
    key_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM], contiguous
    value_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM], contiguous
    block_table,  # [B, max_pages] int32
    cu_seqlens_q,  # [B + 1] int32
    seqused_k,  # [B] int32
    paths,  # [T, path_width] int32, see paths_of; read if TREE
    sinks,  # [num_heads]; read if SINKS
    out,  # [T, num_heads, VALUE_DIM], contiguous; written if not split
    partial_sums,  # [T, num_heads, num_splits, VALUE_DIM] fp32; written if split
    partial_states,  # [T, num_heads, num_splits, 2] fp32, maximum and total; written if split
    stride_query_row, stride_query_head, num_kv_heads, max_pages,
    max_tiles, num_splits,  # most tiles of a sequence; most pieces of a tile, 0: not split
    path_width, window,  # CHUNKED: positions of a chunk; else those that a row sees
    inner_scale, score_scale,  # fp32 scales: of products before the soft cap; of scores to log 2
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PIECE: tl.constexpr,
    ALIGNMENT: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    place = tl.program_id(0) // num_kv_heads
    sequence = (place // max_tiles).to(tl.int64)
    first_pair = (max_tiles - 1 - place % max_tiles) * BLOCK_M  # last tiles first: they see most positions
    first_query, num_rows, prefix, first_row, last_row, begin, end = tile_of(
        cu_seqlens_q, seqused_k, sequence, first_pair, window, GROUP, BLOCK_M, TREE, CHUNKED
    )
    piece = begin // PIECE
    last_piece = (end - 1) // PIECE
    if SPLIT:
        piece += tl.program_id(1)
        last_piece = tl.minimum(last_piece, piece)
    if (first_pair >= num_rows * GROUP) | (piece > last_piece):
        return

    sums, maximum, total = state_of_tile(
        query, key_cache, value_cache, block_table, paths, stride_query_row, stride_query_head, num_kv_heads, max_pages,
        path_width, window, inner_scale, score_scale, sequence, kv_head, first_pair, first_query, num_rows, prefix,
        first_row, last_row, begin, end, piece, last_piece, HEAD_DIM, VALUE_DIM, GROUP, PAGE_SIZE, BLOCK_M, BLOCK_N,
        BLOCK_D, BLOCK_V, PIECE, ALIGNMENT, SOFTCAP, TREE, WINDOWED, CHUNKED, SPLIT,
    )  # fmt: skip
    store_tile(
        sums, maximum, total, sinks, out, partial_sums, partial_states, cu_seqlens_q, seqused_k, sequence, first_pair,
        kv_head, num_kv_heads * GROUP, num_splits, window, VALUE_DIM, GROUP, BLOCK_M, BLOCK_V, TREE, CHUNKED,
        SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _merge_kernel(
    partial_sums,  # [T, num_heads, num_splits, VALUE_DIM] fp32
    partial_states,  # [T, num_heads, num_splits, 2] fp32: maximum, total
    cu_seqlens_q,  # [B + 1] int32
    seqused_k,  # [B] int32
    sinks,  # [num_heads]; read if SINKS
    out,  # [T, num_heads, VALUE_DIM], contiguous
    num_kv_heads, max_tiles, num_splits, window,  # tiles of PAIRS here
    VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr, PAIRS: tl.constexpr, TREE: tl.constexpr, CHUNKED: tl.constexpr, SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    place = tl.program_id(0) // num_kv_heads
    sequence = (place // max_tiles).to(tl.int64)
    first_pair = place % max_tiles * PAIRS
    # The pieces of these pairs are those of their tile in the first kernel.
    first_query, num_rows, _, _, _, begin, end = tile_of(
        cu_seqlens_q, seqused_k, sequence, first_pair // BLOCK_M * BLOCK_M, window, GROUP, BLOCK_M, TREE, CHUNKED
    )
    if first_pair >= num_rows * GROUP:
        return
    merge_pieces(
        partial_sums, partial_states, sinks, out, num_kv_heads, num_splits, kv_head, first_query, num_rows, first_pair,
        begin, end, VALUE_DIM, GROUP, BLOCK_V, PIECE, PAIRS, SINKS,
    )  # fmt: skip


def _has_warp_groups() -> bool:
    """Return whether the device multiplies tiles of 64 rows at once, as Hopper alone does; so does the interpreter."""
    device = properties()
    return device is None or (torch.version.hip is None and device.major == 9)


def launch_config(
    dtype: torch.dtype, head_dim: int, value_dim: int, group: int, *, is_tall: bool = False, has_groups: bool = True
) -> Launch:
    """Choose tiles and warps, for splits of a context or for tall tiles of prompts.

    The length of a tile of KV and the layout of a row within warps define the row's bits, so they depend on the layer
    and the device alone. On Hopper (``has_groups``) each warp has 16 rows of a tile of 16-bit numbers, and each row
    lies in four threads of one warp, in tiles of 64 rows and of 128; ``test_sums_over_a_tile_have_one_order`` looks at
    these layouts. Elsewhere the compiler divides rows among warps, differently for other heights, so there is one
    height.
    """
    block_d, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    larger = max(block_d, block_v)
    if dtype == torch.float32:
        block_m = 32 if block_v <= 64 else 16
        block_n = 16
        num_warps = 4 if block_v <= 128 else 8
        num_stages = 2
    elif has_groups:
        block_m = 128 if is_tall and block_v <= 128 else 64
        block_n = 64 if larger <= 128 else 32
        num_warps = block_m // 16 if block_v <= 128 else 8
        num_stages = 3
    else:
        block_m = 32
        block_n = 64 if larger <= 64 else 32
        num_warps = 4 if larger <= 128 else 8
        num_stages = 3
    constexprs = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "GROUP": group,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "PIECE": PIECE,
        "ALIGNMENT": _alignment(dtype, head_dim),
        "SPLIT": not is_tall,
        "OVERLAPS": overlaps(),
    }
    return Launch(constexprs, num_warps, 2 if torch.version.hip is not None else num_stages, max_registers=255)


def _alignment(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many numbers are 16 bytes if a head is a multiple of 16 bytes, else 1."""
    return 16 // dtype.itemsize if head_dim * dtype.itemsize % 16 == 0 else 1


def _with(launch: Launch, **flags: int) -> Launch:
    """Return the launch with further constants. Flags may leave tall tiles fewer registers for loads ahead."""
    constexprs = {**launch.constexprs, **flags}
    stages = launch.num_stages
    if not constexprs["SPLIT"]:
        stages = 1 if constexprs.get("TREE") or constexprs.get("WINDOWED") else stages
    return replace(launch, constexprs=constexprs, num_stages=stages)


def _merge_launch(launch: Launch) -> Launch:
    """Return the launch of the second kernel for one of the first kernel, with the same flags."""
    shared = ("VALUE_DIM", "GROUP", "BLOCK_M", "BLOCK_V", "PIECE", "TREE", "CHUNKED", "SINKS", "OVERLAPS")
    constexprs = {name: launch.constexprs[name] for name in shared}
    return Launch({**constexprs, "PAIRS": _MERGED_PAIRS}, num_warps=4, num_stages=2)


def _aligned(query: Tensor) -> Tensor:
    """Return the query with the alignment that the compiled kernel assumes, as a copy if necessary."""
    alignment = _alignment(query.dtype, query.shape[2])
    strides_fit = query.stride(2) == 1 and all(stride % alignment == 0 for stride in query.stride()[:2])
    return query if strides_fit and query.data_ptr() % 16 == 0 else query.clone(memory_format=torch.contiguous_format)


def num_pieces_of(batch: PagedBatch, window: int, rows_of_tile: int) -> int:
    """Return the most pieces of the context that a tile's rows see."""
    rows = min(batch.max_seqlen_q, rows_of_tile) if batch.tree_mask is None else batch.max_seqlen_q
    # The rows see at most `window + rows - 1` positions, of chunks too, wherever the first one lies in its piece.
    in_window = triton.cdiv(window + rows - 2, PIECE) + 1
    return max(1, min(in_window, triton.cdiv(batch.max_seqlen_k, PIECE)))


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Launch one kernel, or two if contexts are split; the contract is the oracle's. Pages are not checked.

    A row of a tree is folded over the positions of its own path, so it has the bits of that row in the path's chain.
    """
    (num_rows, num_heads, head_dim) = query.shape
    (num_kv_heads, value_dim) = kv[1].shape[2:]
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    group = num_heads // num_kv_heads
    window = min(params.sliding_window or params.attention_chunk or _NO_WINDOW, _NO_WINDOW)
    columns = batch.seqused_k.numel() * num_kv_heads
    flags = {
        "SOFTCAP": params.softcap is not None,
        "TREE": batch.tree_mask is not None,
        "WINDOWED": window < _NO_WINDOW,
        "CHUNKED": params.attention_chunk is not None,
        "SINKS": params.sinks is not None,
    }
    has_groups = _has_warp_groups()
    launch = launch_config(query.dtype, head_dim, value_dim, group, has_groups=has_groups)
    num_pieces = num_pieces_of(batch, window, triton.cdiv(launch.constexprs["BLOCK_M"], group) + 1)
    tall = launch_config(query.dtype, head_dim, value_dim, group, is_tall=True, has_groups=has_groups)
    num_full = columns * (batch.max_seqlen_q * group // tall.constexprs["BLOCK_M"])
    fits = num_pieces == 1 or 4 * out.numel() * num_pieces <= _LARGEST_BUFFER
    enough = _ENOUGH_PROGRAMS if batch.tree_mask is None else 8 * _ENOUGH_PROGRAMS  # tall tiles of trees are slower
    if num_full >= enough or not fits:
        launch = tall
    is_split = launch is not tall
    num_splits = num_pieces if is_split and num_pieces > 1 else 0
    launch = _with(launch, **flags)
    sinks = query if params.sinks is None else params.sinks
    max_tiles = triton.cdiv(batch.max_seqlen_q * group, launch.constexprs["BLOCK_M"])
    partial_sums = torch.empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32, device=query.device)
    partial_states = torch.empty(num_rows, num_heads, num_splits, 2, dtype=torch.float32, device=query.device)
    query = _aligned(query)
    paths = batch.seqused_k if batch.tree_mask is None else paths_of(batch.tree_mask)
    arguments = (
        query,
        *kv,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seqused_k,
        paths,
        sinks,
        out,
        partial_sums,
        partial_states,
        *query.stride()[:2],
        num_kv_heads,
        batch.block_table.shape[1],
        max_tiles,
        num_splits,
        0 if batch.tree_mask is None else paths.shape[1],
        window,
        params.scale / (params.softcap or 1.0),
        _LOG2_E * (params.softcap or params.scale),
    )
    grid = (columns * max_tiles, max(1, num_splits))
    options = _with(launch, PAGE_SIZE=kv[0].shape[1]).options
    _attention_kernel[grid](*arguments, **options)
    if num_splits:
        sizes = (num_kv_heads, triton.cdiv(batch.max_seqlen_q * group, _MERGED_PAIRS), num_splits, window)
        lengths = (batch.cu_seqlens_q, batch.seqused_k)
        _merge_kernel[(columns * sizes[1],)](
            partial_sums, partial_states, *lengths, sinks, out, *sizes, **_merge_launch(launch).options
        )
    return out


_NO_FLAGS = {"SOFTCAP": False, "TREE": False, "WINDOWED": False, "CHUNKED": False, "SINKS": False}
# Head size of keys and of values, group, page size, flags.
_USUAL = (
    (64, 64, 1, 16, {}),
    (64, 64, 8, 16, {"TREE": True}),
    (64, 64, 8, 16, {"SINKS": True}),
    (64, 64, 8, 16, {"TREE": True, "SINKS": True}),
    (64, 64, 8, 16, {"WINDOWED": True, "SINKS": True}),
    (64, 64, 8, 16, {"SOFTCAP": True, "SINKS": True}),
    (64, 64, 8, 16, {"SOFTCAP": True, "WINDOWED": True, "SINKS": True}),
    (80, 80, 1, 1, {}),
    (128, 128, 4, 16, {}),
    (128, 128, 4, 64, {}),
    (128, 128, 4, 16, {"TREE": True}),
    (128, 128, 4, 64, {"TREE": True}),
    (128, 128, 4, 64, {"WINDOWED": True}),
    (128, 128, 4, 64, {"WINDOWED": True, "TREE": True}),
    (128, 128, 8, 256, {"SOFTCAP": True, "TREE": True}),
    (192, 128, 1, 16, {}),
    (128, 128, 5, 16, {"WINDOWED": True, "CHUNKED": True}),
    (128, 128, 5, 16, {"WINDOWED": True, "CHUNKED": True, "TREE": True}),
    (256, 256, 2, 16, {"SOFTCAP": True}),
    (256, 256, 2, 16, {"SOFTCAP": True, "WINDOWED": True}),
)


def variants() -> Iterator[Variant]:
    """Yield the compilations for usual models: each head size, group, flag and kernel at least once per type."""
    yield from path_variants()
    numbers = dict.fromkeys(BATCH_NUMBERS, "i32") | dict.fromkeys(("inner_scale", "score_scale"), "fp32")
    lengths = ("block_table", "cu_seqlens_q", "seqused_k", "paths")
    partials = ("partial_sums", "partial_states")
    for dtype, kind in TYPE_NAMES.items():
        pointers = ("query", "key_cache", "value_cache", "out")
        types = dict.fromkeys((*pointers, "sinks"), f"*{kind}") | dict.fromkeys(lengths, "*i32") | numbers
        types |= dict.fromkeys(partials, "*fp32")
        merging = {name: kind for name, kind in types.items() if name in _merge_kernel.arg_names}
        for head_dim, value_dim, group, page_size, flags in _USUAL:
            dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}_{value_dim}"
            page = ("page64",) if page_size == 64 else ()
            name = "_".join((kind, f"dim{dims}", f"group{group}", *page, *(flag.lower() for flag in flags)))
            constants = _NO_FLAGS | flags | {"PAGE_SIZE": page_size}
            divisible = (*pointers, *partials)

            def compiled(
                suffix: str = "",
                types: dict[str, str] = types,
                divisible: tuple[str, ...] = divisible,
                is_tall: bool = False,
                sizes: tuple[Any, ...] = (dtype, head_dim, value_dim, group),
                constants: dict[str, int] = constants,
                name: str = name,
            ) -> Variant:
                """Return the compilation for Hopper, and with it the one for other devices."""
                here, elsewhere = (
                    _with(launch_config(*sizes, is_tall=is_tall, has_groups=has_groups), **constants)
                    for has_groups in (True, False)
                )
                other = elsewhere.variant(f"{name}{suffix}", _attention_kernel, types, divisible)
                return replace(here.variant(f"{name}{suffix}", _attention_kernel, types, divisible), elsewhere=other)

            yield compiled()
            yield compiled("_tall", is_tall=True)
            if kind != "fp32" and flags.keys() - {"TREE", "WINDOWED"} == {"SINKS"}:  # a model may keep sinks in fp32
                yield compiled("_fp32", types=types | {"sinks": "*fp32"})
            if name.removeprefix(f"{kind}_") in ("dim128_group4", "dim128_group4_tree", "dim64_group8_sinks"):
                launch = _with(launch_config(dtype, head_dim, value_dim, group), **constants)
                yield _merge_launch(launch).variant(f"{name}_merge", _merge_kernel, merging, (*partials, "out"))
