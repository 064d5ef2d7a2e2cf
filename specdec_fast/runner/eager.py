"""Steps of a model forward by forward; the other runners do the same in fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import to_device
from specdec_fast.kv_cache.forward_layout import lay_out, row_layout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.runner.drafting import DraftPlan, chosen_tokens, draft_on_pages, widened
from specdec_fast.runner.processed_rows import processed_logits
from specdec_fast.runner.verification import StepPlan, Verification

Forward = Callable[[RaggedBatch, PagePool, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class ModelParts:
    """What a runner takes of its model. Forwards have the arguments of ``RaggedModel.forward``."""

    compute: Forward  # computes a batch, by PyTorch or by a program, in all ranks if this one leads others
    forward: Forward  # ``RaggedModel.forward``, through which the forwards of a step pass; the runner computes them
    attached: Callable[[], AbstractContextManager[None]]  # a context in which several forwards of PyTorch cost less
    ops: Ops  # verify, and choose tokens
    vocab_size: int  # width of the logits


class EagerRunner:
    """Runs a model's steps, one forward after the other."""

    def __init__(self, model: ModelParts) -> None:
        self._model = model

    def compute(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> Tensor:
        """Compute the batch's rows; see ``RaggedModel.forward``."""
        return self._model.compute(batch, pool, logit_rows, hidden_states)

    def verify(self, pool: PagePool, plan: StepPlan) -> Verification:
        """Compute logits at every sequence's last committed token and its draft tokens, and verify the draft tokens.

        Args:
            pool: the model's pages.
            plan: the rows.

        """
        trees = plan.trees
        device = plan.draft_tokens.device
        plan.read_drafts()
        token_ids = _interleaved(plan, self._model.vocab_size)
        rows = plan.forward_rows(token_ids) if plan.has_prompts else None
        batch = lay_out(pool, plan.rows, token_ids if rows is None else rows.token_ids, trees=trees)
        started = perf_counter()
        logits = self._model.forward(batch, pool, None if rows is None else rows.verified, plan.hidden_states)
        computed = perf_counter()
        sampling = plan.sampling()  # masks are made while a device computes the forward
        above = None if trees is None else to_device(trees.parents, device)
        chosen_from = logits
        failures = plan.failures
        if plan.has_processors:
            chosen_from, of_processors = processed_logits(plan, logits)
            failures = failures | of_processors
        verify_chain = self._model.ops.without_checks.verify_chain
        cu_seqlens = row_layout(tuple(plan.counts), device).cu_seqlens
        results = verify_chain(chosen_from, token_ids, cu_seqlens, sampling, above)
        hidden_states = plan.hidden_states
        of_prompts = None
        if rows is not None and hidden_states is not None:
            of_prompts = hidden_states[rows.prompts]
            hidden_states = hidden_states[rows.verified]
        return Verification(
            counts=plan.counts,
            logits=logits,
            results=results,
            forward_seconds=computed - started,
            accept_seconds=perf_counter() - computed,
            hidden_states=hidden_states,
            prompt_hidden_states=of_prompts,
            failures=failures,
        )

    def draft(self, pool: PagePool, plan: DraftPlan) -> Tensor:
        """Draft a chain for each sequence by the model's own choice.

        Args:
            pool: the model's pages, with enough free ones for all positions of the step.
            plan: the chains.

        Returns:
            ``[sum(num_draft_tokens)]`` int64, sequence after sequence.

        """
        joint = plan.joint

        def forward(batch: RaggedBatch, carried: None, wanted: Tensor | None) -> tuple[Tensor, None]:
            if joint is None:
                return self._model.forward(batch, pool, wanted, None), None
            batch = replace(batch, token_ids=joint.draft_ids[batch.token_ids])
            logits = self._model.forward(batch, pool, wanted, None)
            return widened(logits, joint.joint_ids, joint.num_ids), None

        def choose(logits: Tensor, sampling: Sampling | None, tokens: Tensor) -> Tensor:
            return chosen_tokens(self._model.ops, logits, plan.num_choosable, sampling, tokens)

        first = to_device(plan.token_ids, pool.layout.device)
        if joint is not None:
            first = joint.joint_ids[first]
        with self._model.attached():
            return draft_on_pages(pool, plan.rows, first, None, plan.num_draft_tokens, forward, choose)


def _interleaved(plan: StepPlan, vocab_size: int) -> Tensor:
    """Return each sequence's last token followed by its draft tokens: ``[T]`` ids on the drafts' device."""
    if plan.unread is not None:
        return plan.unread.clamp(0, vocab_size - 1)  # after NaN logits none was chosen
    first = to_device(plan.last_tokens, plan.draft_tokens.device)
    # Ids outside the vocabulary are clamped: they are rejected anyway, but would index past the embedding.
    drafted = plan.draft_tokens.clamp(0, vocab_size - 1)
    counts = plan.num_draft_tokens
    if min(counts) == max(counts):
        return torch.cat([first[:, None], drafted.view(len(counts), -1)], dim=1).flatten()
    pairs = zip(first.split(1), drafted.split(counts), strict=True)
    return torch.cat([piece for pair in pairs for piece in pair])
