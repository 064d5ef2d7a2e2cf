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
    """How many rows a forward may have, so that every row gets the same bits whatever rows are beside it.

    Attributes:
        multiple: row counts are rounded up to a multiple of it; 1 pads nothing.
        largest: rows of one forward at most: up to there the claim was probed.
        attends_alone: attention gets each row as a sequence of its own, for an implementation whose bits otherwise
            depend on the rows beside it.

    """

    multiple: int = 1
    largest: int = 2048
    attends_alone: bool = False

    def padding(self, num_rows: int) -> int:
        """Return how many rows to add."""
        return -num_rows % self.multiple


@dataclass(frozen=True, kw_only=True)
class RaggedBatch(PagedBatch):
    """The rows of one forward, sequence after sequence.

    Where a RowRule asks for more rows, they are one more sequence, the last, on the scratch page. The fields of
    ``PagedBatch``, ``positions`` and ``slot_mapping`` count it in; ``token_ids``, ``cu_seqlens``,
    ``last_rows`` and ``most_rows`` do not.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T + padding]`` int64, each token's index in its own sequence (I1).
        slot_mapping: ``[T + padding]`` int32, where each row's KV entry goes.
        cu_seqlens: ``[B + 1]`` int32, where each sequence's rows begin.
        last_rows: ``[B]`` int64, the last row of each sequence.
        most_rows: rows of the sequence that has most, ``max_seqlen_q`` but for the padding.

    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens: Tensor
    last_rows: Tensor
    most_rows: int

    @property
    def padding(self) -> int:
        """Rows that belong to nobody."""
        return self.positions.shape[0] - self.token_ids.shape[0]

    def row_by_row(self) -> PagedBatch:
        """Return the same rows for attention, each as a sequence of its own over the same pages."""
        num_rows = self.positions.shape[0]
        each = torch.arange(num_rows + 1, dtype=torch.int32, device=self.positions.device)
        owner = torch.repeat_interleave(self.cu_seqlens_q.diff().long(), output_size=num_rows)
        return PagedBatch(
            cu_seqlens_q=each,
            seqused_k=(self.positions + 1).int(),
            block_table=self.block_table[owner],
            max_seqlen_q=1,
            max_seqlen_k=self.max_seqlen_k,
        )


class RowLayout(NamedTuple):
    """What the rows of a forward have in common with those of every other one of the same counts."""

    cu_seqlens_q: Tensor  # [B + 1] int32, one more with padding; on the device, as the next two
    cu_seqlens: Tensor  # [B + 1] int32
    last_rows: Tensor  # [B] int64
    sequence: np.ndarray  # [T + padding], to which each row belongs
    back: np.ndarray  # [T + padding], each row's position less the end of its sequence's span; negative
    max_count: int
    most_rows: int  # of one sequence, as max_count, but for the padding


@lru_cache(maxsize=256)
def row_layout(counts: tuple[int, ...], padding: int, device: torch.device) -> RowLayout:
    """Make it once, because a run asks for the same few again and again. Nobody may write to what is shared."""
    padded = (*counts, padding) if padding else counts
    cu_seqlens = np.zeros(len(padded) + 1, np.int32)
    np.cumsum(padded, out=cu_seqlens[1:])
    sequence = np.repeat(np.arange(len(padded)), padded)
    back = np.arange(len(sequence)) - cu_seqlens[1:][sequence]
    on_device = to_device(cu_seqlens, device)
    own = on_device[: len(counts) + 1]
    return RowLayout(on_device, own, own[1:].long() - 1, sequence, back, max(padded, default=0), max(counts, default=0))
