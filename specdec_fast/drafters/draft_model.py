"""The draft model: a small causal model with a paged KV cache of its own."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from specdec_fast.cuda_graphs.graphs import described
from specdec_fast.drafters.base import Draft, Drafter, StepResult
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.prefill import prefill
from specdec_fast.models.profiling import forward_seconds
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.request.sequence import Sequence
from specdec_fast.sampling_params import SamplingParams

_MEASURED_LENGTHS, _MEASURED_TIMES = (1, 4), 3  # of proposals
ROWS_EACH = 2  # of one sequence in one forward at most: after a full acceptance its KV lacks two tokens


class ModelDrafter(Drafter):
    """Proposes the draft model's own continuation, chosen as the request asks and with the noise the target will use.

    Its KV cache holds a prefix of every sequence's committed tokens (I3): after a step it lacks one token, two when
    all were accepted, all that was emitted since where it was not asked, and is fed those first. Rejection only lowers
    ``draft_kv_length`` (I4); a prompt is computed once.
    """

    def __init__(self, model: RaggedModel, target_vocab_size: int, max_prefill_tokens: int | None = None) -> None:
        self.model = model
        self._max_prefill_tokens = max_prefill_tokens  # of a step; a sequence that lacks more is drafted for later
        # Checkpoints of one family pad the same vocabulary to different widths; ids beyond the shorter are no words.
        self._vocab_size = min(model.vocab_size, target_vocab_size)
        self._is_narrower = model.vocab_size < target_vocab_size
        self.draft_kv_length: dict[Sequence, int] = {}
        self.pool: PagePool | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.model.name

    def describe(self) -> dict[str, Any]:
        """Return how its forwards run."""
        return {"forward_program": self.model.program is not None, **described(self.model.graphs)}

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Measure the draft model's forward at so many rows, and by proposals of two lengths what they take besides."""
        found = forward_seconds(self.model, row_counts)
        short, long = (self._proposal_seconds(count) for count in _MEASURED_LENGTHS)
        each = max(0.0, long - short) / (_MEASURED_LENGTHS[1] - _MEASURED_LENGTHS[0])
        besides = max(0.0, found[1] - each)  # a forward by itself is a call from Python; in a proposal several are one
        found = {count: max(seconds - besides, seconds / 10) for count, seconds in found.items()}
        return found | {0: max(0.0, short - _MEASURED_LENGTHS[0] * found[1])}

    def _proposal_seconds(self, num_draft_tokens: int) -> float:
        """Return what a proposal for one short sequence takes, the least of some."""
        sequence = Sequence(0, [0, 0], 2, 2 + max(_MEASURED_LENGTHS) + 1, SamplingParams(), frozenset())
        self.prepare(sequence.max_length, self.model.page_size)
        self.admit([sequence])
        seconds = []
        for _ in range(_MEASURED_TIMES):
            started = perf_counter()
            self.propose([sequence], [num_draft_tokens]).token_ids.tolist()  # on a GPU it is only queued
            seconds.append(perf_counter() - started)
            self.commit([sequence], StepResult([range(1)]))
        self.release(sequence)
        return min(seconds)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        """Allocate the pool, or keep the one at hand if it is large enough and an interrupted call left nothing."""
        self.model.expect_same_weights()
        self.draft_kv_length.clear()
        if self.pool is None or not self.pool.is_vacant or self.pool.num_tokens < num_tokens:
            self.pool = None  # give the old one back before asking for more
            self.pool = PagePool(self.model.layout, num_tokens, page_size, self.model.row_padding)

    def grow(self, num_tokens: int) -> None:
        """Exchange the pool for a larger one that holds the same pages."""
        if self._pool().num_tokens < num_tokens:
            self.pool = self._pool().grown(num_tokens)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill every prompt but for its last token, unless steps prefill a limited number of tokens."""
        pool = self._pool()
        served = [sequence for sequence in sequences if self._room(sequence) > 0]
        for sequence in sequences:
            pool.reserve(sequence, sequence.max_length - 1)
            self.draft_kv_length[sequence] = 0
        if self._max_prefill_tokens is None:
            self._feed({sequence: sequence.length - 1 for sequence in served})

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Run the draft model ``max(limits)`` times, each time on one row per sequence still drafting."""
        limits = [min(limit, self._room(s)) for s, limit in zip(sequences, limits, strict=True)]
        if self._max_prefill_tokens is not None:
            self._catch_up(sequences, limits, self._max_prefill_tokens)
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), limits)
        token_ids = self.model.draft_step(
            self._pool(), list(drafting), self._caught_up(list(drafting)), list(drafting.values()), self._vocab_size
        )
        for sequence, limit in drafting.items():
            self.draft_kv_length[sequence] = sequence.length - 1 + limit
        return Draft(token_ids, limits)

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        """Keep the KV entries of accepted tokens, give up those of rejected ones."""
        for sequence in sequences:
            self.draft_kv_length[sequence] = min(self.draft_kv_length[sequence], sequence.length - 1)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages."""
        if self.draft_kv_length.pop(sequence, None) is not None:
            self._pool().free(sequence)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens the draft model's own positions leave it to propose; the target may have more."""
        if self.model.max_positions is None:
            return sequence.max_length
        return max(0, self.model.max_positions - sequence.length + 1)

    def _known(self, token_ids: list[int]) -> list[int]:
        """Replace ids beyond the draft model's embedding: such a token costs acceptance, never correctness."""
        return [min(token, self.model.vocab_size - 1) for token in token_ids] if self._is_narrower else token_ids

    def _feed(self, stops: dict[Sequence, int]) -> None:
        """Compute the KV entries of the first tokens of sequences, ``stops`` of each, as far as they lack them."""
        known = {s: self._known(s.token_ids[:stop]) for s, stop in stops.items()}
        prefill(self.model, self._pool(), known, {s: self.draft_kv_length[s] for s in stops})
        self.draft_kv_length.update(stops)

    def _catch_up(self, sequences: list[Sequence], limits: list[int], left: int) -> None:
        """Feed what a step before has not left behind, ``left`` tokens at most; limits of those who lack more become 0.

        In the first forward of a proposal a sequence may have ``ROWS_EACH`` rows; it does not count as lacking them.
        """
        stops = {}
        for i, sequence in enumerate(sequences):
            start, stop = self.draft_kv_length.get(sequence, 0), sequence.length - 1
            if limits[i] and stop - start >= ROWS_EACH:
                stops[sequence] = min(stop, start + left)
                left -= stops[sequence] - start
                limits[i] = limits[i] if stops[sequence] == stop else 0
        if stops:
            self._feed(stops)

    def _caught_up(self, sequences: list[Sequence]) -> list[int]:
        """Return how many positions of each sequence have their KV entries.

        If those that lack them are too many for one forward, because some have not been drafted for in a while, all
        but the last of each are computed first.
        """
        if sum(s.length - self.draft_kv_length[s] for s in sequences) > self.model.row_padding.largest:
            self._feed({sequence: sequence.length - 1 for sequence in sequences})
        return [self.draft_kv_length[s] for s in sequences]
