"""Steps of a model whose forward program computes each in one call of C++."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec_fast.batch.joint_ids import JointIds
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.program.executors import ForwardProgram, TokenChoice
from specdec_fast.runner.eager import EagerRunner
from specdec_fast.runner.verification import Outcome, StepPlan, Verification, owners


class CppRunner(EagerRunner):
    """Runs a model's steps by its program; its rows need no padding.

    Args:
        program: computes forwards, drafts and verifications.
        *eager: the arguments of ``EagerRunner``, for drafts of sequences that edit logits.

    """

    def __init__(self, program: ForwardProgram, *eager: Any) -> None:
        super().__init__(*eager)
        self._program = program

    def verify(self, pool: PagePool, plan: StepPlan) -> Verification:
        """Verify in one call, unless logits processors come in between or prompts have rows; see ``EagerRunner``."""
        if plan.has_processors or plan.has_prompts:
            found = super().verify(pool, plan)
            return replace(found, results=found.outcome())
        before = self._program.seconds
        spans = pool.spans(plan.rows)
        if plan.parents is not None:
            spans = spans._replace(parents=plan.parents)
        logits, emissions, paths, accept_seconds = self._program.verify(
            spans, plan.last_tokens, plan.draft_tokens, plan.sampling(), plan.hidden_states
        )
        forward_seconds = self._program.seconds - before
        outcome = Outcome(emissions, paths)
        seconds = (forward_seconds, accept_seconds)
        return Verification(plan.counts, logits, outcome, *seconds, plan.hidden_states, failures=plan.failures)

    def draft(
        self,
        pool: PagePool,
        rows: list[Rows],
        token_ids: list[int],
        num_draft_tokens: list[int],
        vocab_size: int,
        joint: JointIds | None = None,
    ) -> Tensor:
        """Draft in one call, unless a sequence edits logits; see ``EagerRunner.draft``."""
        sequences = owners(rows)
        if any(sequence.edits_logits for sequence in sequences):
            return super().draft(pool, rows, token_ids, num_draft_tokens, vocab_size, joint)
        spans = pool.spans(rows, ahead=[count - 1 for count in num_draft_tokens])
        sampling = sampling_of(sequences, pool.layout.device)
        choice = TokenChoice(vocab_size, sampling)
        if joint is not None:
            choice = TokenChoice(
                self._vocab_size,
                sampling,
                target_ids=joint.joint_ids,
                num_target_ids=joint.num_ids,
                drafter_ids=joint.draft_ids,
                num_choosable=vocab_size,
            )
        return self._program.draft(spans, token_ids, num_draft_tokens, choice)
