"""The rows of one forward: their sequences, their pages, and their padding."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.request.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The query rows of one forward and the KV pages they attend over; ``B`` sequences, ``T`` rows.

    The rows of a sequence are its *last* ones: row j of n has KV entry ``seqused_k[b] - n + j``.
    """

    cu_seqlens_q: Tensor  # [B + 1] int32, the first row of each sequence, and the number of rows
    seqused_k: Tensor  # [B] int32, KV entries of each sequence, including those of this forward's rows
    block_table: Tensor  # [B, max_pages] int32, pages in order of position; unused places hold the scratch page
    max_seqlen_q: int  # largest number of rows of a sequence; a launch must know it without waiting for the device
    max_seqlen_k: int  # largest number of KV entries of a sequence
    # [T, num_words] int32, or None for a chain. Bit i % 32 of word i // 32 of a row is set if the row
    # descends from row i of its own sequence. A row's own bit is always set, and no later bit: parents precede their
    # children.
    tree_mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """How one layer computes attention weights from queries and keys."""

    scale: float  # factor on the products, head_dim ** -0.5 for most models
    sliding_window: int | None = None  # number of positions that a row sees, its own included; None: all
    # scores become softcap * tanh(scores / softcap) (Gemma-2, arXiv 2408.00118, section 2)
    softcap: float | None = None
    # [num_heads], in fp32 or the dtype of the queries: one more score per head, neither scaled nor capped. It is
    # part of the softmax's denominator and weighs no value (gpt-oss, arXiv 2508.10925, section 2.1).
    sinks: Tensor | None = None
    # number of positions of a chunk; a row sees those of its own chunk, from position // attention_chunk *
    # attention_chunk on; None: all (Llama-4). A layer has a window or chunks, not both.
    attention_chunk: int | None = None


class Rows(NamedTuple):
    """Consecutive positions of one owner that a forward computes: ``start`` to ``start + count - 1``."""

    owner: Hashable
    start: int
    count: int  # type: ignore[assignment]  # replaces the method tuple.count, which is not used here
    num_drafts: int = 0  # how many of the last ones have draft tokens, which may be rejected


def owners(rows: list[Rows]) -> list[Sequence]:
    """Return the sequences of rows whose owners are sequences, as those of a step are."""
    return [row.owner for row in rows]  # type: ignore[misc]


@dataclass(frozen=True)
class RowPadding:
    """How rows are computed, so that a row has the same bits whatever the other rows.

    Attributes:
        multiple: number of rows to a multiple of which PyTorch's forwards are padded, and in chunks of which linears
            are computed; 1 pads nothing.
        largest: largest number of rows of a prefill forward.
        attend_per_row: whether attention gets each row as a sequence of its own, for an implementation whose bits
            otherwise depend on the other rows.
        one_by_one: whether each forward of PyTorch has one row, so that a batch takes as many forwards as rows.
    """

    multiple: int = 1
    largest: int = 2048
    attend_per_row: bool = False
    one_by_one: bool = False

    def padding(self, num_rows: int) -> int:
        """Return how many rows to add."""
        return -num_rows % self.multiple


@dataclass(frozen=True, kw_only=True)
class RaggedBatch(PagedBatch):
    """The rows of one forward, sequence after sequence."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, each token's index in its own sequence (I1); in a tree, in the text of its path
    slot_mapping: Tensor  # [T] int32, the slot of each row's KV entry
    # [B + 1] int32, the first row of each sequence, and the number of rows; the same as cu_seqlens_q unless a
    # graph's bucket adds sequences of its own
    cu_seqlens: Tensor
    last_rows: Tensor  # [B] int64, the last row of each sequence
    most_rows: int  # largest number of rows of a sequence
    recurrent: RecurrentBatch | None = None  # the rows for recurrent layers; None: the model has none

    def to(self, device: torch.device) -> RaggedBatch:
        """Return a copy on another device."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {name: part.to(device) for name, part in parts.items() if hasattr(part, "to")}
        return replace(self, **moved)

    def row_by_row(self) -> PagedBatch:
        """Return the same rows for attention, each as a sequence of its own over the same pages.

        The rows of trees stay together, because the entries of a row's path lie between others. An implementation whose
        bits depend on the number of rows computes them one after the other.
        """
        if self.tree_mask is not None:
            return self
        num_rows = self.positions.shape[0]
        each = torch.arange(num_rows + 1, dtype=torch.int32, device=self.positions.device)
        return PagedBatch(
            cu_seqlens_q=each,
            seqused_k=(self.positions + 1).int(),
            block_table=self.block_table[self._owners()],
            max_seqlen_q=1,
            max_seqlen_k=self.max_seqlen_k,
        )

    def seeing_all_rows(self) -> PagedBatch:
        """Return the rows of chains for attention in which each sees all rows of its sequence, later ones too.

        Every row is a sequence of its own that ends with the last row of its sequence.
        """
        return replace(self.row_by_row(), seqused_k=self.seqused_k[self._owners()])

    def one_by_one(self) -> list[RaggedBatch]:
        """Return a batch for each row of chains, in order; a row attends to the KV entries of the rows before it."""
        owners = self._owners()
        one = torch.arange(2, dtype=torch.int32, device=self.cu_seqlens.device)  # the copy of a list would wait
        tables = self.block_table[owners]
        used = (self.positions + 1).int()
        num_rows = self.positions.shape[0]
        recurrent = [None] * num_rows if self.recurrent is None else self.recurrent.one_by_one(owners)
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
                recurrent=recurrent[row],
            )
            for row in range(num_rows)
        ]

    def _owners(self) -> Tensor:
        """Return the index of each row's sequence: ``[T]`` int64."""
        counts = self.cu_seqlens_q.diff().long()
        return torch.repeat_interleave(counts, output_size=self.positions.shape[0])
