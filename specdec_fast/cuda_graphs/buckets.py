"""The shapes of a model's graphs, and the tensors that graphs read: a batch is rounded up to a bucket and copied in.

Sequences, rows and pages are rounded up. The rest of a bucket is rows of additional sequences on the scratch page, like
the padding of a RowPadding. Every batch writes the whole bucket, so nothing is left of an earlier batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, RowPadding
from specdec_fast.device_copy import all_to_device

_SHORTEST_CONTEXT = 512  # positions of the smallest bucket: one piece of the attention kernel


@dataclass(frozen=True)
class Bucket:
    """The shapes of a graph.

    Attributes:
        num_rows: rows of the (first) forward.
        num_sequences: places for sequences, including those of padding rows; at least ``one_each``.
        max_seqlen_q: largest number of rows of a sequence.
        num_pages: pages per sequence, the width of the block table.
        one_each: rows of a forward in which every sequence has one row.

    """

    num_rows: int
    num_sequences: int
    max_seqlen_q: int
    num_pages: int
    one_each: int


@dataclass(frozen=True)
class Limits:
    """The sizes of the largest buckets.

    Attributes:
        sequences: sequences of one forward.
        rows_each: rows of one sequence: K + 1 for a target, 2 for a draft model.
        num_forwards: forwards in one graph of a draft model, each on the tokens that the one before it chose: K. Fewer
            forwards, as at the end of a text, run one by one, because every number would need a graph of its own.

    """

    sequences: int
    rows_each: int
    num_forwards: int = 1

    def bucket(
        self, batch: RaggedBatch, page_size: int, row_padding: RowPadding, num_forwards: int = 1
    ) -> Bucket | None:
        """Return the smallest bucket for a batch, with one more row of each sequence per further forward.

        Sequences are rounded up to a power of two; rows to a power of two times the sequences, padded by
        ``row_padding``; pages to a power of two times the shortest context. None if no bucket is large enough.
        """
        num_rows, batch_size = batch.token_ids.shape[0], batch.cu_seqlens.shape[0] - 1
        if not 0 < batch_size <= min(self.sequences, num_rows) or batch.most_rows > self.rows_each:
            return None
        if batch.tree_mask is not None:
            return None
        each = 1 if batch.most_rows == 1 else self.rows_each
        sequences = min(1 << (batch_size - 1).bit_length(), self.sequences)
        one_each, most = (n + row_padding.padding(n) for n in (sequences, sequences * each))
        below, rows = 0, one_each
        while rows < num_rows:
            below, rows = rows, min(2 * rows, most)
        if rows > row_padding.largest:
            return None
        # Places for the sequences of padding rows are added: a sequence has `each` of the most possible padding rows.
        more = -(-(rows - below - 1) // each) if each > 1 else 0
        pages, needed = -(-_SHORTEST_CONTEXT // page_size), -(-(each + num_forwards) // page_size)
        while pages < max(needed, batch.block_table.shape[1]):
            pages *= 2
        return Bucket(rows, max(one_each, sequences + more), each, pages, one_each)


class _Padding(NamedTuple):
    """The rows and sequences that fill a bucket after those of a batch."""

    token_ids: Tensor  # [bucket.num_rows - T] int64; any token will do
    positions: Tensor  # [bucket.num_rows - T] int64
    slot_mapping: Tensor  # [bucket.num_rows - T] int32
    cu_seqlens_q: Tensor  # [bucket.num_sequences - B] int32
    seqused_k: Tensor  # [bucket.num_sequences - B] int32


@lru_cache(maxsize=256)
def _padding(bucket: Bucket, num_rows: int, batch_size: int, page_size: int, device: torch.device) -> _Padding:
    """Make the padding once, because a run needs the same few again and again. Batches copy it."""
    missing, places = bucket.num_rows - num_rows, bucket.num_sequences - batch_size
    ends = np.minimum(bucket.max_seqlen_q * np.arange(1, places + 1), missing)
    positions = np.arange(missing) % bucket.max_seqlen_q
    columns: dict[str, np.ndarray] = {
        "token_ids": np.zeros_like(positions),
        "positions": positions,
        "slot_mapping": (positions % page_size).astype(np.int32),
        "cu_seqlens_q": (num_rows + ends).astype(np.int32),
        "seqused_k": np.diff(ends, prepend=0).astype(np.int32),
    }
    return _Padding(**dict(zip(columns, all_to_device(list(columns.values()), device), strict=True)))


class Inputs:
    """The tensors that a bucket's graphs read.

    Attributes:
        batch: the batch made of these tensors, which are never replaced by others.

    """

    def __init__(self, bucket: Bucket, page_size: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._bucket, self._page_size = bucket, page_size
        cu_seqlens = zeros(bucket.num_sequences + 1)
        self.batch = RaggedBatch(
            token_ids=zeros(bucket.num_rows, dtype=torch.int64),
            positions=zeros(bucket.num_rows, dtype=torch.int64),
            slot_mapping=zeros(bucket.num_rows),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens=cu_seqlens,
            seqused_k=zeros(bucket.num_sequences),
            block_table=zeros(bucket.num_sequences, bucket.num_pages),
            last_rows=zeros(0, dtype=torch.int64),  # they change, so the recorded code must compute them
            most_rows=bucket.max_seqlen_q,
            max_seqlen_q=bucket.max_seqlen_q,
            max_seqlen_k=bucket.num_pages * page_size,
        )

    def fill(self, batch: RaggedBatch) -> None:
        """Copy a batch, without its own padding, and fill the rest of the bucket."""
        own, num_rows, batch_size = self.batch, batch.token_ids.shape[0], batch.cu_seqlens.shape[0] - 1
        padding = _padding(self._bucket, num_rows, batch_size, self._page_size, own.token_ids.device)
        torch.cat((batch.token_ids, padding.token_ids), out=own.token_ids)
        torch.cat((batch.positions[:num_rows], padding.positions), out=own.positions)
        torch.cat((batch.slot_mapping[:num_rows], padding.slot_mapping), out=own.slot_mapping)
        torch.cat((batch.cu_seqlens, padding.cu_seqlens_q), out=own.cu_seqlens_q)
        torch.cat((batch.seqused_k[:batch_size], padding.seqused_k), out=own.seqused_k)
        own.block_table.zero_()
        own.block_table[:batch_size, : batch.block_table.shape[1]] = batch.block_table[:batch_size]
