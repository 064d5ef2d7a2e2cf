"""The draft tokens of a step: what the drafter and the K policy are asked, and what a request's grammar forces."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import replace

import torch

from specdec_fast.device_copy import to_device
from specdec_fast.drafters import Draft, Drafter, StepResult
from specdec_fast.engine.row_limit import RowLimit, is_out_of_memory
from specdec_fast.engine.step import Step
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import StageTimer
from specdec_fast.runner.mask_rows import masks_read_tokens
from specdec_fast.speculation_length import LengthPolicy


def may_draft(sequence: Sequence) -> bool:
    """Return whether a sequence may have draft tokens in a step: not before its first token, nor with a prompt's rows.

    So no drafting delays a first token, and the steps of a request do not depend on which rows its prompt has in one.
    """
    return sequence.num_uncomputed == 1 and sequence.length > sequence.prompt_length


class StepDrafting:
    """The drafter and the K policy of a core, held to their contracts.

    Args:
        drafter: proposes tokens.
        length_policy: decides how many draft tokens each sequence of a step gets.
        row_limit: lowered if the drafter runs out of memory.

    Attributes:
        drafter, length_policy: as passed.
        is_tapped: whether the drafter receives the hidden states of all rows of every sequence.
        drafts_forced: whether tokens that a grammar forces are drafted before anything else, without the drafter.

    """

    def __init__(self, drafter: Drafter, length_policy: LengthPolicy, row_limit: RowLimit) -> None:
        self.drafter = drafter
        self.length_policy = length_policy
        self.is_tapped = bool(drafter.taps)
        self.drafts_forced = True
        self._row_limit = row_limit

    def limits(self, batch: list[Sequence]) -> list[int]:
        """Return how many draft tokens each sequence of a step may get.

        That is the policy's number, or the request's if it is smaller, or the number of those that a grammar forces.
        """
        most = [sequence.params.num_draft_tokens for sequence in batch]
        limits = self.length_policy.checked_limits(batch)
        limits = [k if m is None else min(k, m) for k, m in zip(limits, most, strict=True)]
        if self.drafts_forced:
            limits = limits_with_forced(batch, limits, self.length_policy.max_draft_tokens)
        return [limit if may_draft(sequence) else 0 for sequence, limit in zip(batch, limits, strict=True)]

    def draft(
        self, batch: list[Sequence], limits: list[int], node_limits: list[int], timer: StageTimer
    ) -> tuple[Draft, list[int]]:
        """Return the draft tokens of a step that are worth their rows.

        Args:
            batch: ``B`` sequences.
            limits: per sequence, the largest number of draft tokens of a chain, and the largest depth of a tree.
            node_limits: per sequence, the largest number of nodes of a tree.
            timer: of the stages.

        Returns:
            The draft, without ``parents`` if it consists of chains, and the depth of each sequence's draft.

        Raises:
            DrafterError: the drafter did not return a valid Draft, or it changed a sequence.
            LengthPolicyError: the policy broke its contract.

        """
        asked = limits
        forced = None
        if self.drafts_forced and masks_read_tokens(batch):
            forced = forced_tokens(batch, limits)
            # The drafter is not asked for a sequence that has as many forced tokens as may be.
            asked = [0 if len(tokens) >= limit else limit for limit, tokens in zip(limits, forced, strict=True)]
        # Plain decoding needs no prefill by the drafter, unless it receives all hidden states.
        new = [s for s, limit in zip(batch, asked, strict=True) if (limit or self.is_tapped) and not s.is_admitted]
        if new:
            with timer("prefill"):
                self.admit(new)
        with timer("draft"):
            nodes = [most if limit else 0 for limit, most in zip(asked, node_limits, strict=True)]
            draft, depths = self._proposed(batch, asked, nodes)
            if forced is not None:
                draft, depths = completed(draft, batch, limits, forced)
        return draft, depths

    def admit(self, sequences: list[Sequence]) -> None:
        """Let the drafter admit sequences."""
        self.drafter.admit(list(sequences))
        for sequence in sequences:
            sequence.is_admitted = True

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Let the drafter forget sequences that go on: it admits them again before it drafts for them."""
        for sequence in sequences:
            sequence.is_admitted = False
            self.drafter.release(sequence)

    def commit(
        self, step: Step, rows: list[Many[int]], emitted: Iterable[tuple[Sequence, list[int]]]
    ) -> list[Sequence]:
        """Pass the accepted rows of the step's sequences, and the hidden states of all rows, to the drafter.

        The drafter receives the sequences that are admitted to it and that ``emitted`` names; of those that have ended,
        only what it may keep for others. If it runs out of memory, the tokens stand, and the next forwards are smaller.
        Returns the sequences that it has to admit again then.
        """
        num_emitted = {sequence: len(tokens) for sequence, tokens in emitted}
        unfinished: dict[Sequence, Many[int]] = {}
        ended: dict[Sequence, Many[int]] = {}
        for sequence, accepted in zip(step.batch, rows, strict=True):
            if not sequence.is_admitted or sequence not in num_emitted:
                continue
            if sequence.finish_reason is None:
                unfinished[sequence] = accepted
            elif sequence.error is None and sequence.page_keys is not None:
                ended[sequence] = accepted[: num_emitted[sequence]]  # a stop may have cut the tokens
        hidden_states = step.verification.hidden_states
        try:
            if unfinished:
                self.drafter.commit(list(unfinished), StepResult(list(unfinished.values()), hidden_states))
        except Exception as error:
            self._row_limit.recover(error, unfinished)  # raises it, if it says something else
            self.withdraw(unfinished)
            return list(unfinished)
        if self._row_limit.most is not None:
            self._row_limit.passed()
        elif ended:  # where memory is short, less is kept
            try:
                self.drafter.commit_ended(list(ended), StepResult(list(ended.values()), hidden_states))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        return []

    def release(self, sequences: list[Sequence]) -> None:
        """Let drafter and policy forget sequences; an error for one of them leaves nothing of the others behind."""
        with ExitStack() as stack:
            for sequence in sequences:
                stack.callback(self.drafter.release, sequence)
                stack.callback(self.length_policy.forget, sequence)

    def _proposed(self, batch: list[Sequence], limits: list[int], node_limits: list[int]) -> tuple[Draft, list[int]]:
        """Ask the drafter for at most ``limits[i]`` tokens of sequence i.

        It is not called if all limits are 0 (every sequence is at its last token, or K is 0). It does not see sequences
        that may not draft yet (``may_draft``): their hidden states may not be known.
        """
        if not any(limits):
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), [0] * len(batch)), limits
        shown = [i for i, sequence in enumerate(batch) if may_draft(sequence)]
        if len(shown) == len(batch):
            return self._worth_their_rows(batch, limits, node_limits)
        draft, depths_of_shown = self._worth_their_rows(
            [batch[i] for i in shown], [limits[i] for i in shown], [node_limits[i] for i in shown]
        )
        counts = [0] * len(batch)
        depths = [0] * len(batch)
        for i, count, depth in zip(shown, draft.num_draft_tokens, depths_of_shown, strict=True):
            counts[i] = count
            depths[i] = depth
        return replace(draft, num_draft_tokens=counts), depths

    def _worth_their_rows(
        self, batch: list[Sequence], limits: list[int], node_limits: list[int]
    ) -> tuple[Draft, list[int]]:
        """Return what the drafter proposes, without tokens whose scores are too low for the policy."""
        draft, depths = self.drafter.checked_proposal(batch, limits, node_limits)
        if (scores := draft.scores_by_sequence()) is not None:
            least = self.length_policy.checked_least_score(scores)
            if any(score < least for own in scores for score in own):
                draft = draft.pruned(least)
                depths = draft.depths()
        # A tree as deep as it is large is a chain.
        if draft.parents is not None and depths == list(draft.num_draft_tokens):
            draft = replace(draft, parents=None)
        return draft, depths


def forced_tokens(sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
    """Return the tokens that must follow each sequence, at most its limit; none where nothing is forced."""
    return [
        s.masks.completed(s.emitted_ids, [], limit) if s.masks is not None and limit else []
        for s, limit in zip(sequences, limits, strict=True)
    ]


def limits_with_forced(sequences: list[Sequence], limits: list[int], most: int) -> list[int]:
    """Return limits on draft tokens that leave room for forced ones: at most ``most``, and the request's own limit."""
    if not most or not masks_read_tokens(sequences):
        return limits
    own = [most if s.params.num_draft_tokens is None else s.params.num_draft_tokens for s in sequences]
    room = [min(most, k, s.num_remaining - 1) for s, k in zip(sequences, own, strict=True)]
    forced = forced_tokens(sequences, room)
    return [max(limit, len(tokens)) for limit, tokens in zip(limits, forced, strict=True)]


def completed(
    draft: Draft, sequences: list[Sequence], limits: list[int], forced: list[list[int]]
) -> tuple[Draft, list[int]]:
    """Let the chains of sequences with masks end in what is forced.

    A chain is cut where a token may not be chosen, and goes on with what must follow there. A sequence without a draft
    gets what is forced. Trees stay as they are.

    Args:
        draft: the drafter's, checked.
        sequences: ``B`` sequences.
        limits: the largest number of tokens of each chain.
        forced: what ``forced_tokens`` returned.

    Returns:
        The draft, without ``parents`` if it consists of chains, and the depth of each sequence's draft.
    """
    tokens = draft.tokens_by_sequence()
    parents = [list(above) for above in draft.parents_by_sequence()]
    scores = draft.scores_by_sequence()
    for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
        num_drafted = len(tokens[i])
        if sequence.masks is None or parents[i] != list(range(-1, num_drafted - 1)):
            continue
        tokens[i] = sequence.masks.completed(sequence.emitted_ids, tokens[i], limit) if num_drafted else forced[i]
        parents[i] = list(range(-1, len(tokens[i]) - 1))
        if scores is not None:  # what is forced is as certain as what it follows
            kept = scores[i][: len(tokens[i])]
            scores[i] = kept + (kept[-1:] or [0.0]) * (len(tokens[i]) - len(kept))
    whole = Draft(
        to_device([token for each in tokens for token in each], draft.token_ids.device),
        list(map(len, tokens)),
        None if draft.parents is None else _joined(parents, torch.int32),
        None if scores is None else _joined(scores, torch.float32),
    )
    depths = whole.depths()
    return (replace(whole, parents=None) if depths == whole.num_draft_tokens else whole), depths


def _joined(lists: list[list[int]] | list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype, device="cpu")
