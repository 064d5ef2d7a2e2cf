"""The inner part of ``paged_attention``: which entries a tile of query rows sees, how its softmax folds tiles of KV,
and where its result is stored.

A *pair* is a query row and one head of a KV head's group. The pairs of a sequence are numbered row by row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_fast.triton_kernels.attention_math import (
    empty_state,
    finite,
    merge,
    normalised,
    shift_of,
    tanh,
    with_sink,
)
from specdec_fast.triton_kernels.attention_tree import run_of, slots_of

_LOG2_E = tl.constexpr(1.4426950408889634)

# Arguments that change with the batch. If they were specialised, another batch would get another kernel.
BATCH_TENSORS = ("block_table", "cu_seqlens_q", "seqused_k", "paths")
BATCH_NUMBERS = (
    *("stride_query_row", "stride_query_head", "num_kv_heads", "max_pages"),
    *("max_tiles", "num_splits", "path_width", "window"),
)
UNSPECIALISED = (*BATCH_TENSORS, *BATCH_NUMBERS, "sinks")  # sinks are read one by one, whatever their alignment


@triton.jit
def first_visible(position, window, CHUNKED: tl.constexpr):
    """Return the first position that a row sees, or a number below 0; CHUNKED: ``window`` is the size of a chunk."""
    return position // window * window if CHUNKED else position - window + 1


@triton.jit
def tile_of(
    cu_seqlens_q,  # [B + 1] int32
    seqused_k,  # [B] int32
    sequence, first_pair, window,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, TREE: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return a sequence's first query, rows and prefix; of ``PAIRS`` pairs the rows, and what these see."""
    first_query = tl.load(cu_seqlens_q + sequence)
    num_rows = tl.load(cu_seqlens_q + sequence + 1) - first_query
    prefix = tl.load(seqused_k + sequence) - num_rows
    first_row = first_pair // GROUP
    last_row = tl.minimum((first_pair + PAIRS - 1) // GROUP, num_rows - 1)
    lowest = prefix if TREE else prefix + first_row  # in a tree the rows are not sorted by depth
    begin = tl.maximum(first_visible(lowest, window, CHUNKED), 0)
    return first_query, num_rows, prefix, first_row, last_row, begin, prefix + last_row + 1


@triton.jit
def _visible(
    tile, row_position, window,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return the mask [BLOCK_M, BLOCK_N] of the entries of a tile of KV that each row sees."""
    column = tl.arange(0, BLOCK_N)[None, :]
    visible = column <= (row_position - tile)[:, None]
    if WINDOWED:
        visible &= column >= (first_visible(row_position, window, CHUNKED) - tile)[:, None]
    return visible


@triton.jit
def _load_entries(entries, inside, dims, SIZE: tl.constexpr, PARTIAL: tl.constexpr):
    """Load [BLOCK_N, BLOCK] numbers of a tile of KV; 0 outside of ``inside``."""
    if PARTIAL:
        return tl.load(entries, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
    if dims.shape[0] > SIZE:
        return tl.load(entries, mask=(dims < SIZE)[None, :], other=0.0)
    return tl.load(entries)


@triton.jit
def _pages_of(
    tile, end,  # position; the end of what may be read
    pages,  # [max_pages] int32
    path, prefix,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ON_PATH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the slot of a tile's first entry if the tile lies in one page (WHOLE), else [BLOCK_N] slots."""
    if WHOLE:
        page = tl.load(pages + tile // PAGE_SIZE, mask=tile < end, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + tile % PAGE_SIZE
    else:
        position = tile + tl.arange(0, BLOCK_N)
        slot = slots_of(position, position < end, path, prefix) if ON_PATH else position
        page = tl.load(pages + slot // PAGE_SIZE, mask=position < end, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + slot % PAGE_SIZE
    return slot


@triton.jit
def _fold(
    sums, maximum, total,  # the state: [BLOCK_M, BLOCK_V], [BLOCK_M], [BLOCK_M]
    start, stop,  # positions; start is a multiple of BLOCK_N
    queries,  # [BLOCK_M, BLOCK_D]
    row_position,  # [BLOCK_M], -1: the row takes no part
    key_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM], from the KV head on
    value_cache,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM], from the KV head on
    pages,  # [max_pages] int32
    path,  # [path_width] int32, the path of the last row that takes part; read if ON_PATH
    num_kv_heads, prefix, end, window, inner_scale, score_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, ON_PATH: tl.constexpr, WHOLE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Fold tiles of KV into a softmax state (arXiv 2205.14135, algorithm 1).

    PARTIAL: some rows may not see some of the entries. Otherwise every row sees all entries, and nothing is masked.
    """
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    if not PARTIAL:
        # Pages are read a tile ahead, so that loads of entries need not wait for them.
        coming = _pages_of(start, stop, pages, path, prefix, PAGE_SIZE, BLOCK_N, ON_PATH, WHOLE)
    for tile in tl.range(start, stop, BLOCK_N, num_stages=1 if PARTIAL else None, disable_licm=True):
        inside = tile + tl.arange(0, BLOCK_N) < end
        if not PARTIAL:
            slot = coming
            after = tl.minimum(tile + BLOCK_N, stop - BLOCK_N)
            coming = _pages_of(after, end, pages, path, prefix, PAGE_SIZE, BLOCK_N, ON_PATH, WHOLE)
        else:
            slot = _pages_of(tile, end, pages, path, prefix, PAGE_SIZE, BLOCK_N, ON_PATH, WHOLE)
        head = slot * num_kv_heads
        if WHOLE:
            entry = tl.arange(0, BLOCK_N) * num_kv_heads
            key_at = key_cache + head * HEAD_DIM + (entry * HEAD_DIM)[:, None] + dims[None, :]
            value_at = value_cache + head * VALUE_DIM + (entry * VALUE_DIM)[:, None] + value_dims[None, :]
        else:
            key_at = key_cache + (head * HEAD_DIM)[:, None] + dims[None, :]
            value_at = value_cache + (head * VALUE_DIM)[:, None] + value_dims[None, :]
        keys = _load_entries(key_at, inside, dims, HEAD_DIM, PARTIAL)
        values = _load_entries(value_at, inside, value_dims, VALUE_DIM, PARTIAL)
        products = tl.dot(queries, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            products = tanh(products * inner_scale)
        scores = products * score_scale  # in units of log 2
        if PARTIAL:
            # A value that is not finite must not reach the rows that do not see it, as 0 * NaN would. So the value
            # becomes 0, and the rows that see it get a score that makes them NaN.
            usable = tl.max(tl.where(finite(values), 0, 1), axis=1) == 0
            products = tl.where(usable[None, :], products, float("nan"))
            visible = _visible(tile, row_position, window, BLOCK_N, WINDOWED, CHUNKED)
            scores = tl.where(visible, scores, float("-inf"))
        later_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        shift = shift_of(later_maximum)
        weights = tl.exp2(tl.fma(products, score_scale, -shift[:, None]))
        if PARTIAL:
            weights = tl.where(visible, weights, 0.0)
        rescale = tl.exp2(maximum - shift)
        total = tl.fma(total, rescale, tl.sum(weights, axis=1))
        if PARTIAL:
            values = _load_entries(value_at, inside & usable, value_dims, VALUE_DIM, PARTIAL)
        sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
        maximum = later_maximum
    return sums, maximum, total


@triton.jit
def reduce_piece(
    piece, begin,  # its number; the first position that a row sees
    queries, row_position,
    row,  # [BLOCK_M] the row of each pair, counted from first_row
    first_row, last_row, key_cache, value_cache, pages, paths,
    path_width, num_kv_heads, prefix, end, window, inner_scale, score_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr,
    PIECE: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the softmax state of one piece of the context, which begins empty; the arguments are those of _fold."""
    start = tl.maximum(piece * PIECE, begin // BLOCK_N * BLOCK_N)
    stop = tl.minimum(piece * PIECE + PIECE, end)
    all_end = prefix if TREE else prefix + first_row + 1
    full_start = start
    full_stop = tl.maximum(tl.minimum(stop, all_end // BLOCK_N * BLOCK_N), start)
    if WINDOWED:
        all_begin = tl.maximum(first_visible(prefix + last_row, window, CHUNKED), 0)
        full_start = tl.minimum(tl.maximum(start, tl.cdiv(all_begin, BLOCK_N) * BLOCK_N), full_stop)
    sums, maximum, total = empty_state(BLOCK_M, BLOCK_V)
    WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0  # a tile of KV lies in one page
    if WINDOWED or TREE or queries.dtype == tl.float32:
        # Phase 0: the edge of the window and the entries that every row sees. Then the newest, in a tree run by run.
        position = row_position
        path = paths
        path_end = end
        begun = 0
        for phase in range(last_row - first_row + 2 if TREE else 2):
            if TREE:
                position, path, path_end, begun = run_of(
                    phase, begun, row, row_position, first_row, last_row, paths, path_width, prefix
                )
            newest = tl.minimum(stop, path_end)
            sums, maximum, total = _fold(
                sums, maximum, total, tl.where(phase == 0, start, full_stop), tl.where(phase == 0, full_start, newest),
                queries, position, key_cache, value_cache, pages, path, num_kv_heads, prefix, path_end, window,
                inner_scale, score_scale, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SOFTCAP, WINDOWED,
                CHUNKED, ON_PATH=TREE, WHOLE=False, PARTIAL=True,
            )  # fmt: skip
            sums, maximum, total = _fold(
                sums, maximum, total, full_start, tl.where(phase == 0, full_stop, full_start),
                queries, position, key_cache, value_cache, pages, path, num_kv_heads, prefix, path_end, window,
                inner_scale, score_scale, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, SOFTCAP, WINDOWED,
                CHUNKED, ON_PATH=False, WHOLE=WHOLE and SPLIT and not TREE, PARTIAL=False,
            )  # fmt: skip
    else:
        # Apart from the phases, because there the wgmma instructions of Hopper would wait for one another. Products of
        # fp32, which are none of these, spill registers here if a program computes all pieces.
        for part in tl.static_range(2):
            sums, maximum, total = _fold(
                sums, maximum, total, full_stop if part else start, stop if part else full_stop,
                queries, row_position, key_cache, value_cache, pages, paths,
                num_kv_heads, prefix, end, window, inner_scale, score_scale, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N,
                BLOCK_D, BLOCK_V, SOFTCAP, WINDOWED, CHUNKED, ON_PATH=False, WHOLE=WHOLE, PARTIAL=part == 1,
            )  # fmt: skip
    return sums, maximum, total


@triton.jit
def state_of_tile(
    query, key_cache, value_cache, block_table, paths, stride_query_row, stride_query_head, num_kv_heads, max_pages,
    path_width, window, inner_scale, score_scale,  # as in the kernel
    sequence, kv_head, first_pair, first_query, num_rows, prefix, first_row, last_row, begin, end,  # see tile_of
    piece, last_piece,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PIECE: tl.constexpr,
    ALIGNMENT: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the softmax state of a tile over some pieces of its context."""
    pair = first_pair + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row = tl.minimum(pair // GROUP, last_row)
    head = pair % GROUP  # pairs that pad the tile repeat the last row
    mask = (pair < num_rows * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = (first_query + row).to(tl.int64) * stride_query_row + (kv_head * GROUP + head) * stride_query_head
    queries = tl.load(query + tl.multiple_of(query_at, ALIGNMENT)[:, None] + dims[None, :], mask=mask, other=0.0)
    paths += (first_query + first_row).to(tl.int64) * path_width
    row_position = prefix + (tl.load(paths + (row - first_row) * path_width) if TREE else row)

    key_cache += kv_head * HEAD_DIM
    value_cache += kv_head * VALUE_DIM
    pages = block_table + sequence * max_pages
    if SPLIT:
        sums, maximum, total = reduce_piece(
            piece, begin, queries, row_position, row - first_row, first_row, last_row,
            key_cache, value_cache, pages, paths, path_width, num_kv_heads, prefix, end, window, inner_scale,
            score_scale, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, SOFTCAP, TREE, PIECE,
            WINDOWED, CHUNKED, SPLIT,
        )  # fmt: skip
    else:
        sums, maximum, total = empty_state(BLOCK_M, BLOCK_V)
        for each in range(piece, last_piece + 1):
            later_sums, later_maximum, later_total = reduce_piece(
                each, begin, queries, row_position, row - first_row, first_row, last_row,
                key_cache, value_cache, pages, paths, path_width, num_kv_heads, prefix, end, window, inner_scale,
                score_scale, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, SOFTCAP, TREE, PIECE,
                WINDOWED, CHUNKED, SPLIT,
            )  # fmt: skip
            sums, maximum, total = merge(sums, maximum, total, later_sums, later_maximum, later_total)
    return sums, maximum, total


@triton.jit
def result_of(sums, maximum, total, sinks, head, SINKS: tl.constexpr):
    """Return the output of a softmax state: [PAIRS, BLOCK_V]; ``head``: [PAIRS]."""
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        sums, total = with_sink(sums, maximum, total, sink)
    return normalised(sums, total)


@triton.jit
def store_tile(
    sums, maximum, total,  # the state: [BLOCK_M, BLOCK_V], [BLOCK_M], [BLOCK_M]
    sinks, out, partial_sums, partial_states, cu_seqlens_q, seqused_k,  # as in the kernel
    sequence, first_pair, kv_head, num_heads, num_splits, window,
    VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, TREE: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write a tile's result, or its state if the context is split."""
    # Loaded again from memory: values kept in registers throughout the loops would spill.
    first_query, num_rows, _, first_row, last_row, _, _ = tile_of(
        cu_seqlens_q, seqused_k, sequence, first_pair, window, GROUP, BLOCK_M, TREE, CHUNKED
    )
    pair = first_pair + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_V)
    inside = pair < num_rows * GROUP
    mask = inside[:, None] & (dims < VALUE_DIM)[None, :]
    # The address of the tile's first row; the other rows are near, so that their distances fit int32.
    at = (first_query + first_row).to(tl.int64) * num_heads + kv_head * GROUP
    distance = (tl.minimum(pair // GROUP, last_row) - first_row) * num_heads + pair % GROUP
    if num_splits > 0:
        at = at * num_splits + tl.program_id(1)
        distance = distance * num_splits
        partial_states += at * 2
        tl.store(partial_sums + at * VALUE_DIM + (distance * VALUE_DIM)[:, None] + dims[None, :], sums, mask=mask)
        tl.store(partial_states + distance * 2, maximum, mask=inside)
        tl.store(partial_states + distance * 2 + 1, total, mask=inside)
    else:
        result = result_of(sums, maximum, total, sinks, kv_head * GROUP + pair % GROUP, SINKS).to(out.dtype.element_ty)
        tl.store(out + at * VALUE_DIM + (distance * VALUE_DIM)[:, None] + dims[None, :], result, mask=mask)


@triton.jit
def _piece_at(
    partial_sums, partial_states, at, piece, num_pieces, inside,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load the state of a piece of some pairs, or an empty one behind the last piece."""
    dims = tl.arange(0, BLOCK_V)
    mask = tl.where(inside, num_pieces, 0) > piece
    at += piece
    sums_at = partial_sums + (at * VALUE_DIM)[:, None] + dims[None, :]
    sums = tl.load(sums_at, mask=mask[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    maximum = tl.load(partial_states + at * 2, mask=mask, other=float("-inf"))
    total = tl.load(partial_states + at * 2 + 1, mask=mask, other=0.0)
    return sums, maximum, total


@triton.jit
def merge_pieces(
    partial_sums, partial_states, sinks, out, num_kv_heads, num_splits,  # as in the kernel
    kv_head, first_query, num_rows, first_pair, begin, end,
    VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_V: tl.constexpr, PIECE: tl.constexpr, PAIRS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the states of all pieces of some pairs, in their order, and write the result."""
    pair = first_pair + tl.arange(0, PAIRS)
    dims = tl.arange(0, BLOCK_V)
    inside = pair < num_rows * GROUP
    mask = inside[:, None] & (dims < VALUE_DIM)[None, :]
    head = kv_head * GROUP + pair % GROUP
    out_at = (first_query + pair // GROUP).to(tl.int64) * (num_kv_heads * GROUP) + head
    sums, maximum, total = empty_state(PAIRS, BLOCK_V)
    num_pieces = (end - 1) // PIECE - begin // PIECE + 1
    at = out_at * num_splits
    for first in range(0, num_pieces, 4):
        # All loads of four pieces are issued before the first one is merged. Beyond the last piece, empty states are
        # merged, which changes no bit: sums are multiplied by 1, and 0 is added.
        some = _piece_at(partial_sums, partial_states, at, first, num_pieces, inside, VALUE_DIM, BLOCK_V)
        more = _piece_at(partial_sums, partial_states, at, first + 1, num_pieces, inside, VALUE_DIM, BLOCK_V)
        rest = _piece_at(partial_sums, partial_states, at, first + 2, num_pieces, inside, VALUE_DIM, BLOCK_V)
        last = _piece_at(partial_sums, partial_states, at, first + 3, num_pieces, inside, VALUE_DIM, BLOCK_V)
        sums, maximum, total = merge(sums, maximum, total, some[0], some[1], some[2])
        sums, maximum, total = merge(sums, maximum, total, more[0], more[1], more[2])
        sums, maximum, total = merge(sums, maximum, total, rest[0], rest[1], rest[2])
        sums, maximum, total = merge(sums, maximum, total, last[0], last[1], last[2])
    result = result_of(sums, maximum, total, sinks, head, SINKS).to(out.dtype.element_ty)
    tl.store(out + (out_at * VALUE_DIM)[:, None] + dims[None, :], result, mask=mask)
