"""The engine's side of a drafter's contract: admit, propose, commit."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import replace
from math import inf

import torch

from specdec_fast.drafters import Draft, Drafter, StepResult
from specdec_fast.engine.row_limit import RowLimit
from specdec_fast.engine.step import Step
from specdec_fast.errors import DrafterError
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import StageTimer
from specdec_fast.speculation_length import LengthPolicy


def expect_max_nodes(drafter: Drafter) -> None:
    """Check the largest number of nodes of a drafter's trees.

    Raises:
        DrafterError: it is not an integer from 0 on.

    """
    most = drafter.max_nodes
    if not isinstance(most, int) or not 0 <= most < 2**31:
        raise DrafterError(f"a drafter's max_nodes is {most!r}; expected an integer from 0 on, 0 if it drafts chains.")


def measured_seconds(drafter: Drafter, row_counts: list[int]) -> dict[int, float] | None:
    """Return ``forward_seconds`` of a drafter, held to the contract.

    Raises:
        DrafterError: it is neither None nor finite seconds by number of sequences.

    """
    found = drafter.forward_seconds(list(row_counts))
    if found is None:
        return None
    is_valid = isinstance(found, dict) and all(
        type(count) is int and count >= 0 and isinstance(seconds, (int, float)) and 0 <= seconds < inf
        for count, seconds in found.items()
    )
    if not is_valid or not any(found):
        raise DrafterError(
            f"a drafter's forward_seconds are {found!r}; expected None, or seconds by number of sequences, such as "
            "{0: 0.001, 1: 0.002, 8: 0.003}."
        )
    return found


def admit_new(drafter: Drafter, batch: list[Sequence], limits: list[int], timer: StageTimer, is_tapped: bool) -> None:
    """Admit sequences to the drafter before it first drafts for them: plain decoding needs no prefill by it.

    A drafter with taps admits every sequence, because it receives the hidden states of all its rows.
    """
    new = [s for s, limit in zip(batch, limits, strict=True) if (limit or is_tapped) and not s.is_admitted]
    if new:
        with timer("prefill"):
            admit(drafter, new)


def admit(drafter: Drafter, new: list[Sequence]) -> None:
    """Admit sequences that are not admitted."""
    drafter.admit(list(new))
    for sequence in new:
        sequence.is_admitted = True


def release(drafter: Drafter, policy: LengthPolicy, sequences: list[Sequence]) -> None:
    """Let a drafter and a policy forget sequences; an error for one of them leaves nothing of the others behind."""
    with ExitStack() as stack:
        for sequence in sequences:
            stack.callback(drafter.release, sequence)
            stack.callback(policy.forget, sequence)


def propose(
    drafter: Drafter, policy: LengthPolicy, batch: list[Sequence], limits: list[int], node_limits: list[int]
) -> tuple[Draft, list[int]]:
    """Ask a drafter for at most ``limits[i]`` tokens of sequence i, and keep those that are worth their rows.

    Args:
        drafter: the drafter; not called if all limits are 0 (every sequence is at its last token, or K is 0).
        policy: decides which of the tokens are kept, if they have scores.
        batch: ``B`` sequences.
        limits: per sequence, the largest number of draft tokens of a chain, and the largest depth of a tree.
        node_limits: per sequence, the largest number of nodes of a tree.

    Returns:
        The draft, without ``parents`` if it consists of chains, and the depth of each sequence's draft.

    Raises:
        DrafterError: the drafter did not return a valid Draft, or it changed a sequence.
        LengthPolicyError: the policy broke its contract.

    """
    if not any(limits):
        return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), [0] * len(batch)), limits
    ends = [(s.length, s.token_ids[-1]) for s in batch]  # comparing all tokens would take longer than a step
    draft = drafter.propose_trees(list(batch), list(limits), list(node_limits))
    if [(s.length, *s.token_ids[-1:]) for s in batch] != ends:
        raise DrafterError("a drafter changed the token_ids of a sequence; copy them before editing.")
    if not isinstance(draft, Draft):
        raise DrafterError(f"a drafter proposed a {type(draft).__name__}; expected a Draft, empty if it has no tokens.")
    counts = draft.num_draft_tokens
    if isinstance(counts, (list, tuple)):
        counts = list(counts)  # the drafter may change its own later
    draft = Draft(draft.token_ids, counts, draft.parents, draft.scores)
    depths = draft.check(limits, node_limits)
    if (scores := draft.scores_by_sequence()) is not None:
        least = policy.checked_least_score(scores)
        if any(score < least for own in scores for score in own):
            draft = draft.pruned(least)
            depths = draft.depths()
    if draft.parents is not None and depths == list(draft.num_draft_tokens):  # a tree as deep as it is large is a chain
        draft = replace(draft, parents=None)
    return draft, depths


def commit_to_drafter(
    drafter: Drafter, step: Step, rows: list[Many[int]], live: Container[int], row_limit: RowLimit
) -> list[Sequence]:
    """Pass the accepted rows of the unfinished sequences, and the hidden states of all rows, to the drafter.

    If it runs out of memory, the tokens stand, it admits the sequences again, and the next forwards are smaller.

    Args:
        drafter: the drafter; it receives the sequences that are admitted to it.
        step: of ``B`` sequences.
        rows: the accepted rows of each sequence, from ``Outcome.accepted_rows``.
        live: ids of the requests that have not been cancelled.
        row_limit: counts the step, as passed or as one without enough memory.

    Returns:
        The sequences that the drafter has to admit again.

    """
    unfinished: list[Sequence] = []
    accepted_rows: list[Many[int]] = []
    for sequence, own in zip(step.batch, rows, strict=True):
        if sequence.is_admitted and sequence.finish_reason is None and sequence.request_id in live:
            unfinished.append(sequence)
            accepted_rows.append(own)
    try:
        drafter.commit(list(unfinished), StepResult(accepted_rows, step.verification.hidden_states))
    except Exception as error:
        row_limit.recover(error, unfinished, drafter)  # raises it, if it says something else
        return unfinished
    row_limit.passed()
    return []
