"""The prompts that the engine is prefilling, one chunk per step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters import Drafter
from specdec_fast.engine.prefixes import PrefixCache
from specdec_fast.engine.row_limit import RowLimit
from specdec_fast.engine.step import admit
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.page_keys import ComingPages
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.prefill import prefill
from specdec_fast.runner.ragged_model import RaggedModel


class Prefilling:
    """The resident sequences that lack KV entries for their prompts, in the order in which they joined.

    Prefill computes no entry for the last prompt token: the first verification does, as every later verification does
    for the last committed token (I3). A drafter with taps admits the sequences first, and receives the hidden states of
    every forward. A step prefills ``max_tokens`` at most (None: all), and fewer by ``row_limit`` after memory ran out.

    If prompts begin alike and pages are kept, the first one is computed, and the others wait for its pages: a step then
    has a chunk for it and another one for what they lack.
    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter,
        prefixes: PrefixCache,
        max_tokens: int | None,
        row_limit: RowLimit,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._prefixes = prefixes
        self._max_tokens = max_tokens
        self._row_limit = row_limit
        self.sequences: list[Sequence] = []  # the residents that lack entries
        self.is_tapped = bool(drafter.taps)
        # Whether a step that fails has its prompts prefilled anew: hidden states are needed again, or recurrent states
        # may have advanced in some layers only.
        self._begins_again = self.is_tapped or bool(target.layout.states)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has joined, if it lacks entries: a prompt of one token does not."""
        if sequence.target_kv_length < sequence.length - 1:
            self.sequences.append(sequence)

    def restart(self, pool: PagePool, sequences: Collection[Sequence]) -> None:
        """Compute the entries of sequences once more after a step that failed, if entries alone do not suffice.

        Entries have the same bits each time, hidden states and recurrent states too. The pages stay with the sequences.
        """
        if pool.states is not None:
            for sequence in sequences:
                pool.states.forget(pool.place(sequence))
        if self._begins_again:
            self.drop(sequences)
            others = self.sequences  # which joined later
            self.sequences = []
            for sequence in sequences:
                sequence.target_kv_length = 0
                self.add(sequence)
            self.sequences += others

    def drop(self, sequences: Collection[Sequence]) -> None:
        """Forget sequences; some may not be queued."""
        self.sequences = [sequence for sequence in self.sequences if sequence not in sequences]

    def ready(self, resident: list[Sequence]) -> list[Sequence]:
        """Return the resident sequences that lack no entries."""
        return [sequence for sequence in resident if sequence not in self.sequences]

    def next_chunk(self, pool: PagePool, num_done: int = 0) -> dict[Sequence, int]:
        """Return the next chunk: how many positions of each of its sequences, at least one more, then have entries.

        ``num_done`` prompt tokens have been prefilled in this step. The chunk is empty if the step may prefill no more,
        or if no sequence lacks entries: those whose entries have been found are forgotten.
        """
        chunk: dict[Sequence, int] = {}
        most = None if self._max_tokens is None else self._max_tokens - num_done
        left = min((limit for limit in (most, self._row_limit.most) if limit is not None), default=None)
        coming = ComingPages(pool.page_size)
        found = []
        for sequence in self.sequences:
            if left is not None and left <= 0:
                break
            self._prefixes.share(pool, sequence)
            start = sequence.target_kv_length
            stop = sequence.length - 1
            if start == stop:
                found.append(sequence)
                continue
            if coming.should_wait(sequence.page_keys, sequence.token_ids, start, stop):
                continue
            if left is not None:
                stop = min(stop, start + left)
                left -= stop - start
            coming.add(sequence.page_keys, sequence.token_ids, start, stop)
            chunk[sequence] = stop
        if found:
            self.drop(found)
        num_rows = sum(stop - sequence.target_kv_length for sequence, stop in chunk.items())
        self._row_limit.num_rows = min(num_rows, self._target.row_padding.largest)
        return chunk

    @torch.inference_mode()
    def compute(self, pool: PagePool, chunk: dict[Sequence, int]) -> None:
        """Compute the entries of a chunk, and forget the sequences that then lack none."""
        starts = {sequence: sequence.target_kv_length for sequence in chunk}
        prompts = {s: s.token_ids[:stop] for s, stop in chunk.items()}
        new = [sequence for sequence in chunk if not sequence.is_admitted]
        if self.is_tapped and new:
            admit(self._drafter, new)
        for sequence, start in starts.items():  # after a failed step it may begin before pages that are kept
            pool.own(sequence, start // pool.page_size)
        prefill(self._target, pool, prompts, starts, self._observe if self.is_tapped else None)
        for sequence, stop in chunk.items():
            sequence.target_kv_length = stop
        self._prefixes.keep(pool, chunk)
        self.sequences = [s for s in self.sequences if s.target_kv_length < s.length - 1]

    def passed(self) -> None:
        """Count a step that only prefilled as one that did not run out of memory.

        If prompts are prefilled anew after a failure, it does not count: there may be so many steps that they would
        lift the limit before the next try, and nothing would ever end.
        """
        if not self._begins_again and self._row_limit.most is not None:
            self._row_limit.passed()

    def _observe(self, rows: list[Rows], hidden_states: Tensor) -> None:
        sequences: list[Sequence] = [each.owner for each in rows]  # type: ignore[misc]
        positions = [range(each.start, each.start + each.count) for each in rows]
        self._drafter.observe(sequences, positions, hidden_states)
