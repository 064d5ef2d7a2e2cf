"""Steps of a model whose forward program computes each in one call of C++."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specdec_fast.batch.ragged_batch import owners
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.program.executors import ForwardProgram, TokenChoice
from specdec_fast.runner.drafting import DraftPlan
from specdec_fast.runner.eager import EagerRunner, ModelParts
from specdec_fast.runner.verification import Outcome, StepPlan, Verification


class CppRunner(EagerRunner):
    """Runs each step in one call of a model's program, whose rows need no padding.

    Steps of sequences with logits processors, verifications beside rows of prompts, and drafts of sequences that edit
    logits are computed forward by forward.

    Args:
        model: for what a call does not do.
        program: computes forwards, drafts and verifications.

    """

    def __init__(self, model: ModelParts, program: ForwardProgram) -> None:
        super().__init__(model)
        self._program = program

    def verify(self, pool: PagePool, plan: StepPlan) -> Verification:
        if plan.has_processors or plan.has_prompts:  # the call verifies all of its rows, and calls nothing in between
            found = super().verify(pool, plan)
            return replace(found, results=found.outcome())
        before = self._program.seconds
        spans = pool.spans(plan.rows)
        if plan.parents is not None:
            spans = spans._replace(parents=plan.parents)
        logits, emissions, paths, accept_seconds = self._program.verify(
            spans, plan.last_tokens, plan.draft_tokens, plan.sampling(), plan.hidden_states
        )
        return Verification(
            counts=plan.counts,
            logits=logits,
            results=Outcome(emissions, paths),
            forward_seconds=self._program.seconds - before,
            accept_seconds=accept_seconds,
            hidden_states=plan.hidden_states,
            failures=plan.failures,
        )

    def draft(self, pool: PagePool, plan: DraftPlan) -> Tensor:
        sequences = owners(plan.rows)
        if any(sequence.edits_logits for sequence in sequences):
            return super().draft(pool, plan)
        spans = pool.spans(plan.rows, ahead=[count - 1 for count in plan.num_draft_tokens])
        sampling = sampling_of(sequences, pool.layout.device)
        choice = TokenChoice(plan.num_choosable, sampling)
        if (joint := plan.joint) is not None:
            choice = TokenChoice(
                self._model.vocab_size,
                sampling,
                target_ids=joint.joint_ids,
                num_target_ids=joint.num_ids,
                drafter_ids=joint.draft_ids,
                num_choosable=plan.num_choosable,
            )
        return self._program.draft(spans, plan.token_ids, plan.num_draft_tokens, choice)
