"""How the rows of a forward are laid out on the pages of a pool: positions, slots, block tables, spans.

A forward is laid out by indexing two arrays of the pool: its block tables and the slot of every position. A drafting
loop is laid out at once with the rows it catches up with. What depends on row counts alone is made once and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.page_pool import KVPages, PagePool


class Spans(NamedTuple):
    """Rows as a program takes them, which lays them out by itself.

    Attributes:
        spans: (place in ``tables``, start, count) of each sequence.
        tables: ``[places, max_pages]`` int32, the block table of every owner.
        pages: to which these point.

    """

    spans: list[tuple[int, int, int]]
    tables: Tensor
    pages: KVPages


class RowLayout(NamedTuple):
    """What the rows of a forward have in common with those of every other one of the same counts."""

    cu_seqlens: Tensor  # [B + 1] int32, on the device, as the next
    last_rows: Tensor  # [B] int64
    sequence: np.ndarray  # [T], to which each row belongs
    back: np.ndarray  # [T], each row's position less the end of its sequence's span; negative
    most_rows: int  # of one sequence


@lru_cache(maxsize=256)
def row_layout(counts: tuple[int, ...], device: torch.device) -> RowLayout:
    """Make it once, because a run asks for the same few again and again. Nobody may write to what is shared."""
    cu_seqlens = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    sequence = np.repeat(np.arange(len(counts)), counts)
    back = np.arange(len(sequence)) - cu_seqlens[1:][sequence]
    on_device = to_device(cu_seqlens, device)
    return RowLayout(on_device, on_device[1:].long() - 1, sequence, back, max(counts, default=0))


def lay_out(pool: PagePool, rows: Sequence[Rows], token_ids: Tensor, ahead: int = 0) -> RaggedBatch:
    """Lay out one forward, allocating the pages that its new positions need.

    Args:
        pool: where the owners of ``rows`` have reserved pages.
        rows: the spans of each sequence, in batch order.
        token_ids: ``[T]`` int64 on the pool's device, the spans' tokens one after the other.
        ahead: how many positions after each span get their pages, and their places in the block table, as well.

    Raises:
        KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

    """
    return _laid_out(pool, rows, ahead)[0](token_ids=token_ids)


def decode_batches(pool: PagePool, rows: Sequence[Rows], num_forwards: int) -> list[partial[RaggedBatch]]:
    """Lay out several forwards at once: the spans, then the position after each of them, then the next, ...

    What a forward computes is known before its tokens are, so a drafting loop need not stop to lay it out.

    Args:
        pool: where the owners of ``rows`` have reserved pages.
        rows: the spans of the first forward, in batch order.
        num_forwards: how many; those after the first have one row per span.

    Returns:
        One call per forward, which makes the batch of its ``[T]`` ``token_ids``, a keyword.

    Raises:
        KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

    """
    later = num_forwards - 1
    first, place, end, table = _laid_out(pool, rows, later)
    return [first, *_one_row_each(pool, place, end, table, later)] if later else [first]


def spans_of(pool: PagePool, rows: Sequence[Rows], ahead: Sequence[int] | None = None) -> Spans:
    """Allocate the pages that one forward's new positions need, and leave the layout to a program.

    Args:
        pool: where the owners of ``rows`` have reserved pages.
        rows: the spans of each sequence, in batch order.
        ahead: how many positions after each span get their pages as well; None: none.

    Raises:
        KVCacheTooSmallError: a span, or what comes after it, goes beyond what its owner has reserved.

    """
    found = []
    for i, (owner, start, count) in enumerate(rows):
        pool.allocate(owner, start + count + (ahead[i] if ahead else 0))
        found.append((pool.place(owner), start, count))
    return Spans(found, torch.from_numpy(pool.tables), pool.pages)  # the same memory


def _laid_out(
    pool: PagePool, rows: Sequence[Rows], later: int
) -> tuple[partial[RaggedBatch], np.ndarray, np.ndarray, Tensor]:
    """Lay out one forward with ``later`` to follow; return it, each span's place and end, and the block table."""
    places, ends = [], []
    for owner, start, count in rows:
        ends.append(start + count)
        pool.allocate(owner, start + count + later)
        places.append(pool.place(owner))
    place, end = np.array([places, ends], np.int64)
    longest, device = max(ends, default=0), pool.layout.device
    table = to_device(pool.tables[:, : max(1, pool.num_pages_for(longest + later))][place], device)
    layout = row_layout(tuple([count for _, _, count in rows]), device)
    positions = end[layout.sequence] + layout.back
    first = partial(
        RaggedBatch,
        positions=to_device(positions, device),
        slot_mapping=to_device(pool.slots[place[layout.sequence], positions], device),
        seqused_k=to_device(end.astype(np.int32), device),
        cu_seqlens_q=layout.cu_seqlens,
        cu_seqlens=layout.cu_seqlens,
        last_rows=layout.last_rows,
        most_rows=layout.most_rows,
        block_table=table,
        max_seqlen_q=layout.most_rows,
        max_seqlen_k=longest,
    )
    return first, place, end, table


def _one_row_each(
    pool: PagePool, place: np.ndarray, end: np.ndarray, table: Tensor, num_forwards: int
) -> list[partial[RaggedBatch]]:
    """Lay out the forwards after the first: row j of forward i stands at position ``end[j] + i``."""
    device = pool.layout.device
    layout = row_layout((1,) * len(end), device)
    positions = end + np.arange(num_forwards)[:, None]  # [num_forwards, B]
    slots, used = pool.slots[place, positions], (positions + 1).astype(np.int32)
    longest = int(end.max()) + 1
    per_forward = zip(*(to_device(array, device).unbind() for array in (positions, slots, used)), strict=True)
    return [
        partial(
            RaggedBatch,
            positions=positions,
            slot_mapping=slots,
            seqused_k=used,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens=layout.cu_seqlens,
            last_rows=layout.last_rows,
            most_rows=1,
            block_table=table,
            max_seqlen_q=1,
            max_seqlen_k=longest + i,
        )
        for i, (positions, slots, used) in enumerate(per_forward)
    ]
