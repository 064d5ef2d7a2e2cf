"""Steps of a model whose forward program computes each in one call of C++."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.program.executors import ForwardProgram, TokenChoice
from specdec_fast.runner.eager import EagerRunner
from specdec_fast.runner.verification import Outcome, Verification, owners


class CppRunner(EagerRunner):
    """Runs a model's steps by its program; its rows need no padding.

    Args:
        program: computes forwards, drafts and verifications.
        *eager: the arguments of ``EagerRunner``, for drafts of sequences with a repetition penalty.

    """

    def __init__(self, program: ForwardProgram, *eager: Any) -> None:
        super().__init__(*eager)
        self._program = program

    def verify(
        self,
        pool: PagePool,
        rows: list[Rows],
        draft_tokens: Tensor,
        num_draft_tokens: list[int],
        parents: Tensor | None,
        hidden_states: Tensor | None,
    ) -> Verification:
        """Verify in one call; see ``EagerRunner.verify``."""
        sequences = owners(rows)
        before = self._program.seconds
        sampling = sampling_of(sequences, draft_tokens.device)
        last = [sequence.token_ids[-1] for sequence in sequences]
        spans = pool.spans(rows)
        if parents is not None:
            spans = spans._replace(parents=parents)
        logits, emissions, paths, seconds = self._program.verify(spans, last, draft_tokens, sampling, hidden_states)
        counts = [row.count for row in rows]
        forward_seconds = self._program.seconds - before
        return Verification(counts, logits, Outcome(emissions, paths), forward_seconds, seconds, hidden_states)

    def draft(
        self, pool: PagePool, rows: list[Rows], token_ids: list[int], num_draft_tokens: list[int], vocab_size: int
    ) -> Tensor:
        """Draft in one call, unless a sequence has a repetition penalty; see ``EagerRunner.draft``."""
        sequences = owners(rows)
        if any(sequence.params.repetition_penalty != 1 for sequence in sequences):
            return super().draft(pool, rows, token_ids, num_draft_tokens, vocab_size)
        spans = pool.spans(rows, ahead=[count - 1 for count in num_draft_tokens])
        choice = TokenChoice(vocab_size, sampling_of(sequences, pool.layout.device))
        return self._program.draft(spans, token_ids, num_draft_tokens, choice)
