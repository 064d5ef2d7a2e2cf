"""The shapes of a model's graphs: a batch is rounded up to a bucket.

Sequences, rows and pages are rounded up, so that few graphs serve all batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specdec_fast.batch.ragged_batch import RaggedBatch, RowPadding
from specdec_fast.kv_cache.forward_layout import HostLayout

_SHORTEST_CONTEXT = 512  # positions of the smallest bucket: one piece of the attention kernel
_FEWEST_PROMPT_ROWS = 64  # of the smallest bucket of prompts
# Of the largest one. On an H200 an 8B model computes 1,000 rows in the time in which the host launches their kernels,
# so graphs of more rows would gain nothing.
MOST_PROMPT_ROWS = 1024
_PROMPT_ROWS_MULTIPLE = 256  # of larger buckets; smaller ones are powers of two
_MOST_PROMPTS = 8  # of a prefill; a verification with rows of prompts has as many sequences as without


@dataclass(frozen=True)
class Bucket:
    """The shapes of a graph.

    Attributes:
        num_rows: rows of the (first) forward.
        num_sequences: places for sequences, including those of padding rows; at least ``one_each``.
        max_seqlen_q: largest number of rows of a sequence.
        num_pages: pages per sequence, the width of the block table.
        one_each: rows of a forward in which every sequence has one row.
        num_logit_rows: rows whose logits are wanted, if the forward has rows of prompts.

    """

    num_rows: int
    num_sequences: int
    max_seqlen_q: int
    num_pages: int
    one_each: int
    num_logit_rows: int = 1


class BatchSize(NamedTuple):
    """What decides the bucket of a batch.

    Attributes:
        num_rows: its rows.
        num_sequences: its sequences.
        most_rows: largest number of rows of a sequence.
        num_pages: pages per sequence that its block tables name.

    """

    num_rows: int
    num_sequences: int
    most_rows: int
    num_pages: int


def size_of(batch: RaggedBatch | HostLayout) -> BatchSize:
    """Return what decides the bucket of a batch."""
    if isinstance(batch, HostLayout):
        return BatchSize(len(batch.positions), len(batch.end), batch.counts.most_rows, batch.table.shape[1])
    num_sequences = batch.cu_seqlens.shape[0] - 1
    return BatchSize(batch.token_ids.shape[0], num_sequences, batch.most_rows, batch.block_table.shape[1])


@dataclass(frozen=True)
class GraphLimits:
    """The sizes of the largest buckets.

    Attributes:
        sequences: sequences of one forward.
        rows_each: rows of one sequence: K + 1 for a target, 2 for a draft model.
        tree_rows: rows of one sequence in a verification of trees; 0: trees have no graphs.
        prompt_rows: rows of all sequences of a prefill; 0: prefills have no graphs.
        num_forwards: forwards in one graph of a draft model, each on the tokens that the one before it chose: K. If no
            sequence needs so many, they run one by one, because every number would need a graph of its own.

    """

    sequences: int
    rows_each: int
    num_forwards: int = 1
    tree_rows: int = 0
    prompt_rows: int = 0

    def bucket(
        self,
        size: BatchSize,
        page_size: int,
        row_padding: RowPadding,
        num_positions: int = 1,
        has_trees: bool = False,
    ) -> Bucket | None:
        """Return the smallest bucket for a batch whose sequences need ``num_positions`` from their last rows on.

        Sequences are rounded up to a power of two; rows to a power of two times the sequences, padded by
        ``row_padding``; pages to a power of two times the shortest context. None if no bucket is large enough.
        """
        num_rows, batch_size, most_rows, num_pages = size
        rows_each = self.tree_rows if has_trees else self.rows_each
        if not 0 < batch_size <= min(self.sequences, num_rows) or most_rows > rows_each:
            return None
        each = 1 if most_rows == 1 else rows_each
        sequences = min(1 << (batch_size - 1).bit_length(), self.sequences)
        one_each, most = (n + row_padding.padding(n) for n in (sequences, sequences * each))
        below = 0
        rows = one_each
        while rows < num_rows:
            below = rows
            rows = min(2 * rows, most)
        if rows > row_padding.largest:
            return None
        # Places for the sequences of padding rows are added: a sequence has `each` of the most possible padding rows.
        more = -(-(rows - below - 1) // each) if each > 1 else 0
        pages = -(-_SHORTEST_CONTEXT // page_size)
        needed = -(-(each + num_positions) // page_size)
        while pages < max(needed, num_pages):
            pages *= 2
        return Bucket(rows, max(one_each, sequences + more), each, pages, one_each)

    def prompt_bucket(
        self, size: BatchSize, num_logit_rows: int, page_size: int, row_padding: RowPadding
    ) -> Bucket | None:
        """Return the smallest bucket for a forward with few rows of prompts, or None.

        Sequences, pages and few rows are rounded up to powers of two. The rows that fill the bucket are one sequence.
        The logits of one row are wanted, or as many as a verification of the sequences may have.
        """
        num_rows, batch_size, _, num_pages = size
        is_prefill = num_logit_rows == 1
        if not 0 < num_rows <= self.prompt_rows or batch_size > (_MOST_PROMPTS if is_prefill else self.sequences):
            return None
        rows = max(_FEWEST_PROMPT_ROWS, 1 << (num_rows - 1).bit_length())
        if num_rows > _PROMPT_ROWS_MULTIPLE:
            rows = -(-num_rows // _PROMPT_ROWS_MULTIPLE) * _PROMPT_ROWS_MULTIPLE
        rows += row_padding.padding(rows)
        sequences = 1 << (batch_size - 1).bit_length()
        logit_rows = 1 if is_prefill else min(rows, sequences * self.rows_each)
        if rows > row_padding.largest or num_logit_rows > logit_rows:
            return None
        places = sequences + 1
        shortest = -(-max(_SHORTEST_CONTEXT, rows) // page_size)
        pages = max(shortest, 1 << (num_pages - 1).bit_length())
        return Bucket(rows, places, rows, pages, places, logit_rows)
