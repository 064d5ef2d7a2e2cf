"""The prompts that the engine is prefilling, one chunk per step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from math import isnan

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows, owners
from specdec_fast.engine.drafting import StepDrafting
from specdec_fast.engine.prefixes import PrefixCache
from specdec_fast.engine.row_limit import RowLimit
from specdec_fast.engine.scores import token_scores
from specdec_fast.engine.step import nan_error
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.page_keys import ComingPages
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.prefill import LogitReader, prefill
from specdec_fast.runner.ragged_model import RaggedModel

_LOGIT_ROWS = 256  # of a forward whose logits are wanted; those of a large vocabulary need 80 MB in 16 bits


class Prefilling:
    """The resident sequences that lack KV entries for their prompts, in the order of their turns.

    Prefill computes no entry for the last prompt token: the first verification does, as every later verification does
    for the last committed token (I3). The same forward computes the rows before that token, as far as it has room, so a
    prompt that fits needs one forward for its first token, and not two. The sequence gets no draft tokens in that step.
    Rows whose logits are wanted, or that other prompts wait for, are not left to it.

    A drafter with taps admits the sequences first, and receives the hidden states of every forward. A step prefills
    ``max_tokens`` at most (None: all), and fewer by ``row_limit`` after memory ran out.

    If prompts begin alike and pages are kept, the first one is computed, and the others wait for its pages: a step then
    has a chunk for it and another one for what they lack.

    The logits of these rows score the prompt's tokens after the first, for sequences that request it. A sequence that
    is only scored ends here, so the drafter never sees it.
    """

    def __init__(
        self,
        target: RaggedModel,
        drafting: StepDrafting,
        prefixes: PrefixCache,
        max_tokens: int | None,
        row_limit: RowLimit,
        most_logit_rows: int | None = None,
    ) -> None:
        self._target = target
        self._drafting = drafting
        self._prefixes = prefixes
        self._max_tokens = max_tokens
        self._row_limit = row_limit
        self._most_logit_rows = min(_LOGIT_ROWS, most_logit_rows or _LOGIT_ROWS)
        self.sequences: list[Sequence] = []  # the residents that lack entries
        # Those of them whose rows the verification of this step has room for.
        self._for_verification: set[Sequence] = set()
        # Whether a step that fails has its prompts prefilled anew: hidden states are needed again, or recurrent states
        # may have advanced in some layers only.
        self._begins_again = drafting.is_tapped or bool(target.layout.states)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has joined, if it lacks entries, which a prompt of one token does not, or ends here."""
        if sequence.target_kv_length < sequence.length - 1 or sequence.is_only_scored:
            insort(self.sequences, sequence, key=lambda each: each.turn)

    def restart(self, pool: PagePool, sequences: Collection[Sequence]) -> None:
        """Queue sequences of a step that failed, if they lack entries, or if entries alone do not suffice.

        Entries have the same bits each time, hidden states and recurrent states too. The pages stay with the sequences.
        """
        self.drop(sequences)
        for sequence in sequences:
            if pool.states is not None:
                pool.states.forget(pool.place(sequence))
            if self._begins_again:
                sequence.target_kv_length = 0
            self.add(sequence)

    def drop(self, sequences: Collection[Sequence]) -> None:
        """Forget sequences; some may not be queued."""
        self.sequences = [sequence for sequence in self.sequences if sequence not in sequences]
        self._for_verification.difference_update(sequences)

    def ready(self, resident: list[Sequence]) -> list[Sequence]:
        """Return the resident sequences that lack no entries but those of rows which the verification computes."""
        return [
            sequence for sequence in resident if sequence in self._for_verification or sequence not in self.sequences
        ]

    def next_chunk(self, pool: PagePool, num_done: int = 0, free_rows: int = 0) -> dict[Sequence, int]:
        """Return the next chunk: how many positions of each of its sequences then have entries.

        It is at least one more, but for a text of one token that is only scored. ``num_done`` prompt tokens have been
        prefilled in this step, whose verification computes ``free_rows`` more. The chunk is empty if the step may
        prefill no more, or if no sequence lacks further entries: those whose entries have been found are forgotten.
        """
        chunk: dict[Sequence, int] = {}
        most = None if self._max_tokens is None else self._max_tokens - num_done
        left = min((limit for limit in (most, self._row_limit.most) if limit is not None), default=None)
        coming = ComingPages(pool.page_size)
        self._for_verification = set()
        found = []
        has_waiting = False
        for sequence in self.sequences:
            if left is not None and left <= 0:
                break
            self._prefixes.share(pool, sequence)
            start = sequence.target_kv_length
            stop = sequence.length - 1
            if start == stop and not sequence.is_only_scored:
                found.append(sequence)
                continue
            useful = min(stop, sequence.most_from_cache)
            if coming.should_wait(sequence.page_keys, sequence.token_ids, start, useful):
                has_waiting = True
                continue
            if left is not None:
                stop = min(stop, start + left)
                left -= stop - start
            coming.add(sequence.page_keys, sequence.token_ids, start, stop)
            chunk[sequence] = stop
        if found:
            self.drop(found)
        if not has_waiting:  # else what others wait for would come a step later
            self._keep_for_verification(chunk, free_rows)
        num_rows = sum(stop - sequence.target_kv_length for sequence, stop in chunk.items())
        self._row_limit.num_rows = min(num_rows, self._target.row_padding.largest)
        return chunk

    def _keep_for_verification(self, chunk: dict[Sequence, int], free_rows: int) -> None:
        """Take the last rows of prompts out of the chunk that completes them, as many as the verification may have."""
        if self._row_limit.most is not None:
            return
        for sequence in reversed(list(chunk)):
            is_scored = sequence.is_only_scored or sequence.first_unscored is not None
            if is_scored or chunk[sequence] < sequence.length - 1 or not free_rows:
                continue
            count = min(free_rows, chunk[sequence] - sequence.target_kv_length)
            free_rows -= count
            chunk[sequence] -= count
            if chunk[sequence] == sequence.target_kv_length:
                del chunk[sequence]
                self._for_verification.add(sequence)

    @torch.inference_mode()
    def compute(self, pool: PagePool, chunk: dict[Sequence, int]) -> None:
        """Compute the entries of a chunk, and forget the sequences that then lack none."""
        if self._drafting.is_tapped:
            decoded = [sequence for sequence in chunk if not sequence.is_only_scored]
            if new := [sequence for sequence in decoded if not sequence.is_admitted]:
                self._drafting.admit(new)
            self._prefill(pool, {s: chunk[s] for s in decoded}, self.observe)
            self._prefill(pool, {s: stop for s, stop in chunk.items() if s.is_only_scored}, None)
        else:
            self._prefill(pool, chunk, None)
        for sequence, stop in chunk.items():
            sequence.target_kv_length = stop
        self._prefixes.keep(pool, chunk)
        self.sequences = [s for s in self.sequences if s not in chunk or s.target_kv_length < s.length - 1]

    def _prefill(
        self, pool: PagePool, chunk: dict[Sequence, int], observe: Callable[[list[Rows], Tensor], None] | None
    ) -> None:
        starts = {sequence: sequence.target_kv_length for sequence in chunk}
        prompts = {s: s.token_ids[:stop] for s, stop in chunk.items()}
        for sequence, start in starts.items():  # after a failed step it may begin before pages that are kept
            pool.own(sequence, start // pool.page_size)
        unscored = {s: first for s in chunk if (first := s.first_unscored) is not None}
        reader = LogitReader(unscored, self._score, self._most_logit_rows) if unscored else None
        prefill(self._target, pool, prompts, starts, observe, reader)

    def pass_on(self, pool: PagePool, batch: list[Sequence], *, has_trees: bool) -> list[Rows]:
        """Return the rows of prompts that the verification of a batch computes, and forget these prompts.

        If the verification fails, the caller must call ``restart``. No forward has both trees of draft tokens and rows
        of prompts, so beside trees the rows are computed now.
        """
        ends = {s: s.length - 1 for s in batch if s.num_uncomputed > 1}
        if not ends:
            return []
        if has_trees:
            self.compute(pool, ends)
            return []
        self.drop(ends)
        for sequence in ends:
            pool.own(sequence, sequence.target_kv_length // pool.page_size)
        return [Rows(s, s.target_kv_length, stop - s.target_kv_length) for s, stop in ends.items()]

    def passed(self) -> None:
        """Count a step that only prefilled as one that did not run out of memory.

        If prompts are prefilled anew after a failure, it does not count: there may be so many steps that they would
        lift the limit before the next try, and nothing would ever end.
        """
        if not self._begins_again and self._row_limit.most is not None:
            self._row_limit.passed()

    def _score(self, rows: list[Rows], logits: Tensor) -> None:
        """Score the tokens after some positions of prompts."""
        sequences = owners(rows)
        tokens = []
        for sequence, (_, start, count, _) in zip(sequences, rows, strict=True):
            tokens += sequence.token_ids[start + 1 : start + count + 1]
        num_top = max(sequence.params.prompt_logprobs or 0 for sequence in sequences)
        scores = token_scores(logits, list(range(len(tokens))), tokens, num_top, with_ranks=True)
        first = 0
        for sequence, (_, start, count, _) in zip(sequences, rows, strict=True):
            found = scores.logprobs[first : first + count]
            num_valid = next((i for i, value in enumerate(found) if isnan(value)), count)
            known = sequence.prompt_scores
            if known is not None and sequence.finish_reason is None:
                assert len(known.logprobs) == start, "every position is scored once, in order"
                known.extend(scores.part(first, first + num_valid, sequence.params.prompt_logprobs or 0))
                if num_valid < count:
                    sequence.fail(nan_error(start + num_valid + 1, "the prompt's next token cannot be scored"))
            first += count

    def observe(self, rows: list[Rows], hidden_states: Tensor) -> None:
        """Pass the hidden states of rows of prompts, ``[R, taps, H]``, to the drafter."""
        sequences = owners(rows)
        positions = [range(each.start, each.start + each.count) for each in rows]
        self._drafting.drafter.observe(sequences, positions, hidden_states)
