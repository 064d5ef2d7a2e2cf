"""The draft model: a small causal model with a paged KV cache of its own."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_fast.drafters.base import StepResult
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.shared.pooled import PooledDrafter
from specdec_fast.request.page_keys import ComingPages
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.graphs.graphs import described
from specdec_fast.runner.model_memory import forward_memory, logits_bytes, weights_of
from specdec_fast.runner.prefill import prefill
from specdec_fast.runner.profiling import PROPOSAL_LENGTHS, drafting_seconds, most_proposed
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.sampling_params import SamplingParams

ROWS_EACH = 2  # most rows of one sequence in a decoding forward: after a full acceptance its KV lacks two tokens
_PROBE = [0, 0]  # any tokens


class ModelDrafter(PooledDrafter):
    """Proposes the draft model's own continuation, by the request's sampling parameters and the target's noise.

    Its KV cache holds a prefix of every sequence's committed tokens (I3). After a step it lacks one token, two after a
    full acceptance, or all tokens emitted since the last proposal. The next proposal computes these first. Rejection
    only lowers ``draft_kv_length`` (I4), so the draft model computes a prompt once.
    """

    settings = ("draft_quantization",)
    rows_each = ROWS_EACH

    def __init__(
        self,
        model: RaggedModel,
        target_vocab_size: int,
        max_prefill_tokens: int | None = None,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(model.layout, model.row_padding)
        self.model = model
        self._max_batch_size = max_batch_size  # with which its forwards are timed
        self._max_prefill_tokens = max_prefill_tokens  # per step; a sequence that lacks more gets its draft later
        # Checkpoints of one family pad the same vocabulary to different widths; ids beyond the smaller are padding.
        self._vocab_size = min(model.vocab_size, target_vocab_size)
        self._is_narrower = model.vocab_size < target_vocab_size
        self.draft_kv_length: dict[Sequence, int] = {}

    @property
    def name(self) -> str:
        return self.model.name

    def describe(self) -> dict[str, Any]:
        return {"forward_program": self.model.has_program, **described(self.model.graphs)}

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        # A sequence has one recurrent state, so its rows are computed one after the other.
        most_sequences = self._max_batch_size if self.model.layout.states else max(row_counts)
        return drafting_seconds(self.model, row_counts, most_sequences, self._proposal_seconds)

    def weights(self) -> Iterable[Tensor]:
        return weights_of(self.model.model)

    @property
    def estimates_memory(self) -> bool:
        return self.model.program is None

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        return self.model.layout.bytes_per_slot(most_proposed(most_draft_tokens))

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        largest = self.model.row_padding.largest
        decoding = num_sequences * self.rows_each
        if prefill_rows is None:  # a draft may begin with all tokens that a sequence has got without one
            row_counts = {(max(decoding, largest), num_sequences)}
        else:
            row_counts = {(decoding, num_sequences), (min(prefill_rows, largest), 1)}
        memory = forward_memory(self.model, row_counts)
        return memory.held + memory.working + num_sequences * logits_bytes(self.model)

    def limit_prefill(self, max_prefill_tokens: int | None) -> None:
        self._max_prefill_tokens = max_prefill_tokens

    def _proposal_seconds(self, num_draft_tokens: int) -> float:
        probe = self._probe()
        longest = len(probe) + max(PROPOSAL_LENGTHS) + 1
        sequence = Sequence(0, probe, len(probe), longest, SamplingParams(), frozenset())
        self.prepare(sequence.max_length, self.model.page_size)
        self.admit([sequence])
        started = perf_counter()
        self.propose([sequence], [num_draft_tokens]).token_ids.tolist()  # tolist() waits for a GPU
        seconds = perf_counter() - started
        self.release(sequence)
        return seconds

    def prepare(self, num_tokens: int, page_size: int) -> None:
        self.model.expect_same_weights()
        self.draft_kv_length.clear()
        super().prepare(num_tokens, page_size)

    def admit(self, sequences: list[Sequence]) -> None:
        # With max_prefill_tokens, propose prefills in chunks.
        pool = self._pool()
        served = [sequence for sequence in sequences if self._max_draft_tokens(sequence) > 0]
        for sequence in sequences:
            pool.add(sequence)
            self.draft_kv_length[sequence] = 0
            self._share(sequence)
        if self._max_prefill_tokens is None:
            self._prefill({sequence: len(self._tokens(sequence)) - 1 for sequence in served})

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        limits = [min(limit, self._max_draft_tokens(s)) for s, limit in zip(sequences, limits, strict=True)]
        if self._max_prefill_tokens is not None:
            self._prefill_chunk(sequences, limits, self._max_prefill_tokens)
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), limits)
        token_ids = self.model.draft_step(
            self._pool(), list(drafting), self._catch_up(list(drafting)), list(drafting.values()), self._vocab_size
        )
        for sequence, limit in drafting.items():
            self.draft_kv_length[sequence] = sequence.length - 1 + limit
        return Draft(token_ids, limits)

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        for sequence in sequences:
            self.draft_kv_length[sequence] = min(self.draft_kv_length[sequence], sequence.length - 1)
        self._keep(sequences)

    def commit_ended(self, sequences: list[Sequence], result: StepResult) -> None:
        self.commit(sequences, result)
        pool = self._pool()
        lacking = {}
        for sequence in sequences:
            end = sequence.length - 1
            # After a full acceptance, or a last step without a draft, one or two rows are missing.
            is_near = end - self.draft_kv_length[sequence] <= ROWS_EACH and self._max_draft_tokens(sequence) > 0
            if is_near and end // pool.page_size > pool.num_kept(sequence):
                lacking[sequence] = end
        self._prefill(lacking)

    def release(self, sequence: Sequence) -> None:
        if self.draft_kv_length.pop(sequence, None) is not None:
            self._pool().free(sequence)

    def _probe(self) -> list[int]:
        """Return tokens of the target behind which a proposal is timed."""
        return list(_PROBE)

    def _tokens(self, sequence: Sequence) -> list[int]:
        """Return the committed tokens of a sequence as the draft model reads them."""
        return sequence.token_ids

    def _max_draft_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the draft model's positions allow; the target may have more positions."""
        if self.model.max_positions is None:
            return sequence.max_length
        return max(0, self.model.max_positions - len(self._tokens(sequence)) + 1)

    def _clamped(self, token_ids: list[int]) -> list[int]:
        """Clamp ids to the draft model's embedding: a clamped id costs acceptance, never correctness."""
        return [min(token, self.model.vocab_size - 1) for token in token_ids] if self._is_narrower else token_ids

    def _share(self, sequence: Sequence) -> None:
        """Let a sequence have the pages that others have computed of its tokens."""
        pool = self._pool()
        if sequence.page_keys is not None and pool.prefixes is not None:
            num_pages = (sequence.length - 1) // pool.page_size
            if pool.share(sequence, sequence.page_keys.first(sequence.token_ids, num_pages)):
                self.draft_kv_length[sequence] = pool.num_kept(sequence) * pool.page_size

    def _keep(self, sequences: Iterable[Sequence]) -> None:
        """Keep the full pages of sequences for others; all entries that they have are those of committed tokens."""
        pool = self._pool()
        if pool.prefixes is None:
            return
        for sequence in sequences:
            num_pages = self.draft_kv_length[sequence] // pool.page_size
            if sequence.page_keys is not None and num_pages > pool.num_kept(sequence):
                pool.keep(sequence, sequence.page_keys.first(sequence.token_ids, num_pages))

    def _prefill(self, stops: dict[Sequence, int]) -> None:
        """Compute the missing KV entries of the first ``stops[sequence]`` tokens of each sequence.

        What several sequences have in common is computed for the first of them, and the others wait for it.
        """
        while stops:
            coming = ComingPages(self._pool().page_size)
            now = {s: stop for s, stop in stops.items() if self._begins(s, stop, coming)}
            prompts = {s: self._clamped(self._tokens(s)[:stop]) for s, stop in now.items()}
            prefill(self.model, self._pool(), prompts, {s: self.draft_kv_length[s] for s in now})
            for sequence, stop in now.items():
                self.draft_kv_length[sequence] = max(stop, self.draft_kv_length[sequence])
            self._keep(now)
            stops = {s: stop for s, stop in stops.items() if s not in now}

    def _begins(self, sequence: Sequence, stop: int, coming: ComingPages) -> bool:
        """Return whether a sequence is among those of the next forwards; otherwise it waits for their pages."""
        self._share(sequence)
        start = self.draft_kv_length[sequence]
        if coming.should_wait(sequence.page_keys, sequence.token_ids, start, stop):
            return False
        coming.add(sequence.page_keys, sequence.token_ids, start, stop)
        return True

    def _prefill_chunk(self, sequences: list[Sequence], limits: list[int], left: int) -> None:
        """Compute missing KV entries of at most ``left`` tokens; set the limits of sequences that lack more to 0.

        The first forward of a proposal may have ``rows_each`` rows per sequence: a sequence that lacks fewer entries
        needs no prefill.
        """
        stops = {}
        coming = ComingPages(self._pool().page_size)
        for i, sequence in enumerate(sequences):
            if not limits[i]:
                continue
            stop = len(self._tokens(sequence)) - 1
            if stop - self.draft_kv_length.get(sequence, 0) < self.rows_each:
                continue
            if not self._begins(sequence, stop, coming):
                limits[i] = 0
                continue
            start = self.draft_kv_length[sequence]
            stops[sequence] = min(stop, start + left)
            left -= stops[sequence] - start
            limits[i] = limits[i] if stops[sequence] == stop else 0
        if stops:
            self._prefill(stops)

    def _catch_up(self, sequences: list[Sequence]) -> list[int]:
        """Return how many positions of each sequence have KV entries.

        If one forward cannot hold all positions without entries (nothing was drafted for some sequences for many
        steps), this prefills all but the last committed token of each sequence first.
        """
        if sum(len(self._tokens(s)) - self.draft_kv_length[s] for s in sequences) > self.model.row_padding.largest:
            self._prefill({sequence: len(self._tokens(sequence)) - 1 for sequence in sequences})
        return [self.draft_kv_length[s] for s in sequences]
