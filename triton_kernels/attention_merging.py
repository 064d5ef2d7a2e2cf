"""``paged_attention`` over split contexts in one launch: the program that is last to end merges the pieces of its tile.

Programs of a tile count when their state is in memory. The last one, whichever it is, merges all states in the order of
the pieces, so no bit depends on the order in which programs end. The count is an atomic operation that acquires and
releases, so the last program reads what the others wrote; it reads past the L1 cache. Then it sets the counter to 0 for
the next launch. No GPU has run this kernel yet; forward programs launch it only if they are asked to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_fast.triton_kernels.attention_tile import UNSPECIALISED, merge_pieces, state_of_tile, store_tile, tile_of
from specdec_fast.triton_kernels.overlap import wait


@triton.jit(do_not_specialize=UNSPECIALISED)
def merging_kernel(
    query,  # [T, num_heads, HEAD_DIM], the last axis contiguous
    key_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM], contiguous
    value_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM], contiguous
    block_table,  # [B, max_pages] int32
    cu_seqlens_q,  # [B + 1] int32
    seqused_k,  # [B] int32
    paths,  # [T, path_width] int32, see paths_of; read if TREE
    sinks,  # [num_heads]; read if SINKS
    out,  # [T, num_heads, VALUE_DIM], contiguous; written by the last program of a tile
    partial_sums,  # [T, num_heads, num_splits, VALUE_DIM] fp32
    partial_states,  # [T, num_heads, num_splits, 2] fp32, maximum and total
    stride_query_row, stride_query_head, num_kv_heads, max_pages,
    max_tiles, num_splits,  # most tiles of a sequence; most pieces of a tile
    path_width, window,  # CHUNKED: positions of a chunk; else those that a row sees
    inner_scale, score_scale,  # fp32 scales: of products before the soft cap; of scores to log 2
    counters,  # [sequences x tiles x KV heads] int32, zeros before and after
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PIECE: tl.constexpr,
    ALIGNMENT: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one piece of a tile's context, and merge all of them if the others are there."""
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
    tl.debug_barrier()  # every thread's part of the state is written before one of them counts
    number = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
    # Loaded again from memory, as in ``store_tile``.
    first_query, num_rows, _, _, _, begin, end = tile_of(
        cu_seqlens_q, seqused_k, sequence, first_pair, window, GROUP, BLOCK_M, TREE, CHUNKED
    )
    if number == (end - 1) // PIECE - begin // PIECE:
        merge_pieces(
            partial_sums, partial_states, sinks, out, num_kv_heads, num_splits, kv_head, first_query, num_rows,
            first_pair, begin, end, VALUE_DIM, GROUP, BLOCK_V, PIECE, BLOCK_M, SINKS, 1, ".cg",
        )  # fmt: skip
        tl.store(counters + tl.program_id(0), 0)
