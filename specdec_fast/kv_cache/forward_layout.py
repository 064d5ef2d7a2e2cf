"""The layout of a forward's rows on the pages of a pool: positions, slots, block tables, spans.

The layout is read from two arrays of the pool: the block tables, and the slot of every position. The forwards of one
drafting loop are laid out together. Tensors that depend on row counts only are cached and shared. Pages are allocated
for new positions, or KVCacheTooSmallError is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.device_copy import all_to_device, to_device
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.kv_cache.state_pool import RecurrentRows
from specdec_fast.trees.rows import TreeRows


class RowCounts(NamedTuple):
    """The part of a layout that all forwards with the same row counts share, on the host."""

    cu_seqlens: np.ndarray  # [B + 1] int32
    sequence: np.ndarray  # [T], index of each row's sequence
    offset_from_end: np.ndarray  # [T], each row's position minus the end of its sequence's span; negative
    draft_index: np.ndarray  # [T] int64, of each row's draft token among those of all sequences; -1: a first row
    most_rows: int  # of one sequence


class RowLayout(NamedTuple):
    """The same on the device, and the host's."""

    counts: RowCounts
    cu_seqlens: Tensor  # [B + 1] int32
    last_rows: Tensor  # [B] int64


class HostLayout(NamedTuple):
    """The layout of a forward before it is copied to a device."""

    counts: RowCounts  # what follows from the row counts
    place: np.ndarray  # [B] int64, each sequence's row in the pool's tables
    end: np.ndarray  # [B] int64, the number of each sequence's KV entries after the forward
    table: np.ndarray  # [B, max_pages] int32, block tables
    positions: np.ndarray  # [T] int64
    slots: np.ndarray  # [T] int32
    recurrent: RecurrentRows | None  # of the state slots; None: the model has no recurrent layers


@lru_cache(maxsize=256)
def row_counts(counts: tuple[int, ...]) -> RowCounts:
    """Describe row counts. It is cached, because a run repeats few of them; callers must not modify it."""
    cu_seqlens = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    sequence = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(sequence))
    draft_index = rows - sequence - 1
    draft_index[cu_seqlens[:-1][np.diff(cu_seqlens) > 0]] = -1
    offset_from_end = rows - cu_seqlens[1:][sequence]
    return RowCounts(cu_seqlens, sequence, offset_from_end, draft_index, max(counts, default=0))


@lru_cache(maxsize=256)
def row_layout(counts: tuple[int, ...], device: torch.device) -> RowLayout:
    """Return the layout of row counts on a device. It is cached as well; callers must not modify it."""
    counted = row_counts(counts)
    cu_seqlens = to_device(counted.cu_seqlens.copy(), device)
    return RowLayout(counted, cu_seqlens, cu_seqlens[1:].long() - 1)


def lay_out_on_host(pool: PagePool, rows: Sequence[Rows], ahead: int | Sequence[int] = 0) -> HostLayout:
    """Lay out one forward, and allocate the pages that its new positions need; see ``lay_out``.

    ``ahead`` may differ between sequences. Then all of them have block tables for the largest one; what lies behind a
    sequence's own pages is the scratch page.
    """
    places = []
    ends = []
    each = [ahead] * len(rows) if isinstance(ahead, int) else ahead
    for (owner, start, count, _), further in zip(rows, each, strict=True):
        ends.append(start + count)
        pool.allocate(owner, start + count + further)
        places.append(pool.place(owner))
    place, end = np.array([places, ends], np.int64)
    num_pages = max(1, pool.num_pages_for(max(ends, default=0) + max(each, default=0)))
    pool.widen(num_pages)
    table = pool.tables[:, :num_pages][place]
    counts = row_counts(tuple([row.count for row in rows]))
    positions = end[counts.sequence] + counts.offset_from_end
    slots = pool.slots[place[counts.sequence], positions]
    recurrent = None if pool.states is None else pool.states.advance(rows, place)
    return HostLayout(counts, place, end, table, positions, slots, recurrent)


def take_back(pool: PagePool, layout: HostLayout) -> None:
    """Forget a layout whose forward has not run, so that the same rows can be laid out again."""
    if pool.states is not None and layout.recurrent is not None:
        pool.states.take_back(layout.recurrent)


def lay_out(
    pool: PagePool, rows: Sequence[Rows], token_ids: Tensor, ahead: int = 0, trees: TreeRows | None = None
) -> RaggedBatch:
    """Lay out one forward, and allocate the pages that its new positions need.

    Args:
        pool: has the owners of ``rows``.
        rows: the span of each sequence, in batch order.
        token_ids: ``[T]`` int64 on the pool's device, the spans' tokens one after the other.
        ahead: number of positions after each span that get pages, and entries in the block table, as well.
        trees: if the rows of each span are a tree, its shape. Rows then have consecutive slots, and their positions are
            those of their depths. None: chains.
    """
    batch = _laid_out(pool, rows, ahead)[0](token_ids=token_ids)
    if trees is None:
        return batch
    starts = np.repeat([row.start for row in rows], [row.count for row in rows])
    positions, mask = all_to_device((starts + trees.depths, trees.mask), token_ids.device)
    return replace(batch, positions=positions, tree_mask=mask)


def decode_batches(pool: PagePool, rows: Sequence[Rows], num_forwards: int) -> list[partial[RaggedBatch]]:
    """Lay out several forwards at once: the spans, then the position after each span, then the next one, and so on.

    The positions of a forward are known before its tokens, so a drafting loop need not stop for the layout. The first
    one has the spans ``rows``, in batch order; every later one has one row per span. There is one function per forward:
    called with the keyword ``token_ids``, ``[T]``, it returns the batch.
    """
    later = num_forwards - 1
    first, place, end, table = _laid_out(pool, rows, later)
    return [first, *_one_row_each(pool, place, end, table, later)] if later else [first]


def batch_without_pages(token_ids: Tensor) -> RaggedBatch:
    """Return rows of a function that has no KV entries: each is a sequence of its own, on the scratch page."""
    return _without_pages(len(token_ids), token_ids.device)(token_ids=token_ids)


@lru_cache(maxsize=256)
def _without_pages(num_rows: int, device: torch.device) -> partial[RaggedBatch]:
    layout = row_layout((1,) * num_rows, device)
    table = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
    positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
    used = torch.ones_like(table[:, 0])
    return _forward(layout, table, 1, positions, table[:, 0].contiguous(), used)


def _laid_out(
    pool: PagePool, rows: Sequence[Rows], later: int
) -> tuple[partial[RaggedBatch], np.ndarray, np.ndarray, Tensor]:
    """Lay out the first forward, with pages for ``later`` more.

    Returns it, each span's place and end (``[B]`` each), and the block table of all forwards.
    """
    host = lay_out_on_host(pool, rows, later)
    device = pool.layout.device
    layout = row_layout(tuple([row.count for row in rows]), device)
    arrays = (host.table, host.positions, host.slots, host.end.astype(np.int32), *(host.recurrent or ()))
    on_device, positions, slots, used, *recurrent = all_to_device(arrays, device)
    longest = int(host.end.max(initial=0))
    first = _forward(layout, on_device, longest, positions, slots, used, *recurrent)
    return first, host.place, host.end, on_device


def _one_row_each(
    pool: PagePool, place: np.ndarray, end: np.ndarray, table: Tensor, num_forwards: int
) -> list[partial[RaggedBatch]]:
    """Lay out the forwards after the first: row j of forward i has position ``end[j] + i``."""
    device = pool.layout.device
    layout = row_layout((1,) * len(end), device)
    positions = end + np.arange(num_forwards)[:, None]  # [num_forwards, B]
    slots = pool.slots[place, positions]
    used = (positions + 1).astype(np.int32)
    arrays = [positions, slots, used]
    if pool.states is not None:
        behind = [pool.states.behind(place, each) for each in positions]
        arrays += [np.stack(each) for each in zip(*behind, strict=True)]
    longest = int(end.max()) + 1
    per_forward = zip(*(array.unbind() for array in all_to_device(arrays, device)), strict=True)
    return [_forward(layout, table, longest + i, *each) for i, each in enumerate(per_forward)]


def _forward(
    layout: RowLayout,
    table: Tensor,
    longest: int,
    positions: Tensor,
    slots: Tensor,
    used: Tensor,
    *recurrent: Tensor,
) -> partial[RaggedBatch]:
    """Return the batch of one forward without its ``token_ids``; the longest sequence has ``longest`` KV entries.

    ``recurrent`` are the arrays of ``RecurrentRows``, if the model has recurrent layers.
    """
    of_states = None
    if recurrent:
        arrays = dict(zip(RecurrentRows._fields, recurrent, strict=True))
        of_states = RecurrentBatch(cu_seqlens=layout.cu_seqlens, **arrays)
    return partial(
        RaggedBatch,
        positions=positions,
        slot_mapping=slots,
        seqused_k=used,
        cu_seqlens_q=layout.cu_seqlens,
        cu_seqlens=layout.cu_seqlens,
        last_rows=layout.last_rows,
        most_rows=layout.counts.most_rows,
        block_table=table,
        max_seqlen_q=layout.counts.most_rows,
        max_seqlen_k=longest,
        recurrent=of_states,
    )
