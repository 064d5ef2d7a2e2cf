"""The rows of a forward: whose they are, how many there may be, and what they have in common with other forwards'."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.ragged import PagedBatch
from specdec_fast.transfers import to_device


class Rows(NamedTuple):
    """Consecutive positions of one owner that a forward computes: ``start`` to ``start + count - 1``."""

    owner: Hashable
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants


class KVPages(NamedTuple):
    """Where a pool's pages are, as a program takes them.

    Attributes:
        addresses: ``[num_layers, 2]`` int64 on the CPU, of every layer's keys and values.
        num_pages: the scratch page included.
        page_size: positions per page.
        memory: what the addresses point into, kept alive.

    """

    addresses: Tensor
    num_pages: int
    page_size: int
    memory: tuple[Tensor, ...]


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


@dataclass(frozen=True)
class RowRule:
    """How rows are computed, so that every row gets the same bits whatever rows are beside it.

    Attributes:
        multiple: PyTorch computes so many rows or a multiple of it, and linears in chunks of them; 1 pads nothing.
        largest: rows of one prefill forward at most.
        attends_alone: attention gets each row as a sequence of its own, for an implementation whose bits otherwise
            depend on the rows beside it.
        one_by_one: a forward of PyTorch's has one row, and a batch takes as many as it has rows.

    """

    multiple: int = 1
    largest: int = 2048
    attends_alone: bool = False
    one_by_one: bool = False

    def padding(self, num_rows: int) -> int:
        """Return how many rows to add."""
        return -num_rows % self.multiple


@dataclass(frozen=True, kw_only=True)
class RaggedBatch(PagedBatch):
    """The rows of one forward, sequence after sequence.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, each token's index in its own sequence (I1).
        slot_mapping: ``[T]`` int32, where each row's KV entry goes.
        cu_seqlens: ``[B + 1]`` int32, where each sequence's rows begin; the same as ``cu_seqlens_q`` unless a graph's
            bucket adds sequences of its own.
        last_rows: ``[B]`` int64, the last row of each sequence.
        most_rows: rows of the sequence that has most.

    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens: Tensor
    last_rows: Tensor
    most_rows: int

    def row_by_row(self) -> PagedBatch:
        """Return the same rows for attention, each as a sequence of its own over the same pages."""
        num_rows = self.positions.shape[0]
        each = torch.arange(num_rows + 1, dtype=torch.int32, device=self.positions.device)
        return PagedBatch(
            cu_seqlens_q=each,
            seqused_k=(self.positions + 1).int(),
            block_table=self.block_table[self._owners()],
            max_seqlen_q=1,
            max_seqlen_k=self.max_seqlen_k,
        )

    def one_by_one(self) -> list[RaggedBatch]:
        """Return a batch of each row, in order: it attends to the KV entries of those before it."""
        owners, one = self._owners(), self.cu_seqlens.new_tensor([0, 1])
        tables, used = self.block_table[owners], (self.positions + 1).int()
        return [
            RaggedBatch(
                token_ids=self.token_ids[row : row + 1],
                positions=self.positions[row : row + 1],
                slot_mapping=self.slot_mapping[row : row + 1],
                cu_seqlens_q=one,
                cu_seqlens=one,
                seqused_k=used[row : row + 1],
                block_table=tables[row : row + 1],
                last_rows=self.last_rows.new_zeros(1),
                most_rows=1,
                max_seqlen_q=1,
                max_seqlen_k=self.max_seqlen_k,
            )
            for row in range(self.positions.shape[0])
        ]

    def _owners(self) -> Tensor:
        """Return the place of each row's sequence: ``[T]`` int64."""
        counts = self.cu_seqlens_q.diff().long()
        return torch.repeat_interleave(counts, output_size=self.positions.shape[0])


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
