"""One step of the engine: its numbers of draft tokens, a launched step, and the output of a finished one."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from specdec_fast.drafters import Draft
from specdec_fast.errors import RequestError, StepError
from specdec_fast.models.verification import Outcome, Verification
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import FinishReason
from specdec_fast.speculation_length import LengthPolicy, StepObservation


class StepOutput(NamedTuple):
    """The output of one step for one request.

    Attributes:
        request: the sequence.
        token_ids: tokens that it emitted in this step; empty if it failed before emitting one.
        finish_reason: None if it has not ended.

    """

    request: Sequence
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Step:
    """A step that has been launched.

    Attributes:
        batch: its ``B`` sequences.
        limits: per sequence, the number of draft tokens that the engine asked for.
        draft: the draft tokens that are verified.
        depths: per sequence, the depth of its draft; of a chain, the number of its tokens.
        verification: the target's verification of these tokens.
        started: time at which drafting began, with the drafter's prefill of new sequences, by ``perf_counter``.
        drafted: time at which it ended.
        may_branch: whether a tree might have more nodes than a chain has tokens.

    """

    batch: list[Sequence]
    limits: list[int]
    draft: Draft
    depths: list[int]
    verification: Verification
    started: float
    drafted: float
    may_branch: bool

    def observation(self, outcome: Outcome, last_finished: float) -> StepObservation:
        """Return the counts and times of the finished step, for ``LengthPolicy.observe``.

        Args:
            outcome: what was accepted.
            last_finished: end of the step before, from which on the time is this step's; 0.0: from ``started`` on.

        """
        draft_seconds, verify_seconds = self.drafted - self.started, self.verification.forward_seconds
        other_seconds = perf_counter() - (last_finished or self.started) - draft_seconds - verify_seconds
        num_accepted = [len(emission) - 1 for emission in outcome.emissions]
        counts, seconds = (self.limits, self.depths, num_accepted), (draft_seconds, verify_seconds, other_seconds)
        batch = list(self.batch)  # the policy may change it
        scores = self.draft.scores_by_sequence()
        if scores is None:
            return StepObservation(batch, *counts, *seconds, self.may_branch)
        paths = outcome.paths or [list(range(1, count + 1)) for count in num_accepted]
        accepted = [[row - 1 for row in path] for path in paths]
        return StepObservation(batch, *counts, *seconds, self.may_branch, scores, accepted)


def step_error(error: BaseException) -> StepError:
    """Return the error of a request whose step raised ``error``."""
    reason = StepError(f"the step that served this request failed: {type(error).__name__}: {error}")
    reason.__cause__ = error
    return reason


def raise_cause(error: RequestError | None) -> None:
    """Raise what failed a request's step, as it was raised there.

    An interrupt of another thread is raised as the StepError. So is a StopIteration: outputs are made by generators,
    out of which Python lets none.
    """
    if not isinstance(error, StepError):
        return
    cause = error.__cause__
    if isinstance(cause, Exception) and not isinstance(cause, (StopIteration, StopAsyncIteration)):
        raise cause
    raise error


def draft_limits(policy: LengthPolicy, batch: list[Sequence]) -> list[int]:
    """Return how many draft tokens each sequence may get: the policy's number, or the request's if that is smaller.

    Raises:
        LengthPolicyError: the policy broke its contract.

    """
    limits = policy.checked_limits(batch)
    most = [sequence.params.num_draft_tokens for sequence in batch]
    return [k if m is None else min(k, m) for k, m in zip(limits, most, strict=True)]
