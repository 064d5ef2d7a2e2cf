"""The engine's side of a drafter's contract: admit, propose, commit."""

from __future__ import annotations

from collections.abc import Container

import torch

from specdec_fast.drafters import Draft, Drafter, StepResult
from specdec_fast.errors import DrafterError
from specdec_fast.models.verification import Verification
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import StageTimer


def admit_new(drafter: Drafter, batch: list[Sequence], limits: list[int], timer: StageTimer) -> None:
    """Admit sequences to the drafter before it first drafts for them: plain decoding needs no prefill by it.

    A drafter with taps admits every sequence, because it receives the hidden states of all its rows.
    """
    is_tapped = bool(drafter.taps)
    new = [s for s, limit in zip(batch, limits, strict=True) if (limit or is_tapped) and not s.is_admitted]
    if new:
        with timer("prefill"):
            admit(drafter, new)


def admit(drafter: Drafter, new: list[Sequence]) -> None:
    """Admit sequences that are not admitted."""
    drafter.admit(new)
    for sequence in new:
        sequence.is_admitted = True


def propose(drafter: Drafter, batch: list[Sequence], limits: list[int], device: torch.device) -> Draft:
    """Ask a drafter for at most ``limits[i]`` tokens of sequence i, and check its draft against the contract.

    Args:
        drafter: the drafter; not called if all limits are 0 (every sequence is at its last token, or K is 0).
        batch: ``B`` sequences.
        limits: per sequence, the largest number of draft tokens.
        device: the target's.

    Raises:
        DrafterError: the drafter did not return a valid Draft, or it changed a sequence.

    """
    if not any(limits):
        return Draft(torch.empty(0, dtype=torch.int64, device=device), [0] * len(batch))
    ends = [(s.length, s.token_ids[-1]) for s in batch]  # comparing all tokens would take longer than a step
    draft = drafter.propose(batch, list(limits))
    if [(s.length, *s.token_ids[-1:]) for s in batch] != ends:
        raise DrafterError("a drafter changed the token_ids of a sequence; copy them before editing.")
    if not isinstance(draft, Draft):
        raise DrafterError(f"a drafter proposed a {type(draft).__name__}; expected a Draft, empty if it has no tokens.")
    draft.check(limits)
    return draft


def commit(
    drafter: Drafter,
    batch: list[Sequence],
    verification: Verification,
    emissions: list[list[int]],
    live: Container[int],
) -> None:
    """Pass the accepted rows of the unfinished sequences, and the hidden states of all rows, to the drafter.

    Args:
        drafter: the drafter; it receives the sequences that are admitted to it.
        batch: the sequences of a step.
        verification: of the step's rows.
        emissions: the tokens that the target chose for each sequence.
        live: ids of the requests that have not been cancelled.

    """
    unfinished, rows, first_row = [], [], 0
    for sequence, count, emission in zip(batch, verification.counts, emissions, strict=True):
        if sequence.is_admitted and sequence.finish_reason is None and sequence.request_id in live:
            unfinished.append(sequence)
            rows.append(range(first_row, first_row + len(emission)))
        first_row += count
    drafter.commit(unfinished, StepResult(rows, verification.hidden_states))
