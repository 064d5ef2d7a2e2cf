"""A launched step, what a finished one commits, and the errors of its requests."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import isnan
from time import perf_counter
from typing import NamedTuple

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters import Draft
from specdec_fast.errors import InvalidLogitsError, NoAllowedTokenError, RequestError, StepError
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import FinishReason, TokenScores
from specdec_fast.runner.verification import Outcome, Verification
from specdec_fast.speculation_length import StepObservation


class StepOutput(NamedTuple):
    """The output of one step for one request."""

    request: Sequence
    token_ids: list[int]  # emitted in this step; empty if the request failed before it emitted one
    finish_reason: FinishReason | None  # None if it has not ended


@dataclass(frozen=True)
class Step:
    """A step of ``B`` sequences that has been launched."""

    batch: list[Sequence]
    limits: list[int]  # per sequence, the number of draft tokens that the engine asked for
    draft: Draft  # the draft tokens that are verified
    depths: list[int]  # per sequence, the depth of its draft; of a chain, the number of its tokens
    verification: Verification
    started: float  # when drafting began, with the drafter's prefill of new sequences, by ``perf_counter``
    drafted: float  # when it ended
    may_branch: bool  # whether a tree might have more nodes than a chain has tokens
    prompt_rows: list[Rows]  # the spans of prompts in its forward, in front of the verified rows; see ``StepPlan``

    @property
    def num_rows(self) -> int:
        """The number of rows of its forward."""
        return sum(self.verification.counts) + sum(rows.count for rows in self.prompt_rows)

    def can_be_followed(self, live: Container[int]) -> bool:
        """Return whether the host knows all of the next step but its tokens, before it has read those of this one.

        If there are draft tokens, it does not: how many are accepted decides where the next rows begin. ``live`` has
        the ids of the requests that have neither ended nor been cancelled.
        """
        return not any(self.limits) and all(s.request_id in live and _may_follow(s) for s in self.batch)

    def observation(self, outcome: Outcome, last_finished: float) -> StepObservation:
        """Return the counts and times of the finished step, for ``LengthPolicy.observe``.

        The time since ``last_finished``, the end of the step before, is this step's; 0.0: that since ``started``.
        """
        draft_seconds = self.drafted - self.started
        verify_seconds = self.verification.forward_seconds
        other_seconds = perf_counter() - (last_finished or self.started) - draft_seconds - verify_seconds
        num_accepted = [len(emission) - 1 for emission in outcome.emissions]
        scores = self.draft.scores_by_sequence()
        accepted_nodes = None
        if scores is not None:
            paths = outcome.paths or [list(range(1, count + 1)) for count in num_accepted]
            accepted_nodes = [[row - 1 for row in path] for path in paths]
        return StepObservation(
            batch=list(self.batch),  # the policy may change it
            limits=self.limits,
            num_draft_tokens=self.depths,
            num_accepted=num_accepted,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            other_seconds=other_seconds,
            may_branch=self.may_branch,
            scores=scores,
            accepted_nodes=accepted_nodes,
        )


def _may_follow(sequence: Sequence) -> bool:
    """Whether its next row needs only the token of the present step, and no one reads the present logits later.

    A graph writes the logits of every step to the same memory; log-probabilities are read from them.
    """
    reads_tokens = sequence.edits_logits or sequence.params.logits_processors
    return sequence.num_remaining > 1 and not reads_tokens and sequence.logprobs is None


def commit_emissions(
    step: Step,
    emissions: Many[list[int]],
    rows: Many[Many[int]],
    scores: Many[TokenScores | None],
    live: Container[int],
) -> list[tuple[Sequence, list[int]]]:
    """Commit the emissions of a step; return the sequences with the tokens that each emitted.

    Only requests whose ids are in ``live``: the others have been cancelled, and stay as they are. ``rows`` are those of
    the forward at which each sequence's tokens were chosen.
    """
    emitted = []
    for i, sequence in enumerate(step.batch):
        if sequence.request_id not in live:
            continue
        own_scores = scores[i]
        emission = emissions[i] if own_scores is None else _cut_without_score(emissions[i], own_scores)
        num_accepted = len(emission) - 1
        has_next = emission[-1] != INVALID_TOKEN
        tokens = emission if has_next else emission[:-1]
        if tokens:
            num_drafted = step.draft.num_draft_tokens[i]
            tokens = sequence.append_emission(num_drafted, num_accepted, tokens, own_scores, step.depths[i])
        emitted.append((sequence, tokens))
        if not has_next and sequence.finish_reason is None:
            was_chosen = emission is not emissions[i]
            row = rows[i][-1]
            sequence.fail(_no_score(sequence) if was_chosen else _why_no_token(step.verification, row, sequence))
    return emitted


def _cut_without_score(emission: list[int], scores: TokenScores) -> list[int]:
    """Return an emission that ends, with ``INVALID_TOKEN``, before its first token whose log-probability is a NaN."""
    first = next((i for i, value in enumerate(scores.logprobs) if isnan(value)), None)
    return emission if first is None else [*emission[:first], INVALID_TOKEN]


def _no_score(sequence: Sequence) -> InvalidLogitsError:
    """Return the error of a request whose next token cannot be scored: its logit, or another one, is infinite."""
    return InvalidLogitsError(
        f"the target's logits after {sequence.length} tokens hold an infinity, so the next token has no "
        "log-probability; check its weights, load it in a wider dtype (float16 overflows above 65504), or ask for no "
        "logprobs."
    )


def _why_no_token(verification: Verification, row: int, sequence: Sequence) -> RequestError:
    """Return why nothing was chosen at a row of a verification: it cannot be, after the sequence's present tokens."""
    if (failure := verification.failures.get(row)) is not None:
        return failure
    # Where nothing restricts the choice, only NaN leaves no token. The logits are not read there: a following step may
    # have overwritten them.
    is_free = not sequence.edits_logits and not sequence.params.logits_processors
    if is_free or bool(verification.logits[row].isnan().any()):
        return nan_error(sequence.length, "no token can be chosen")
    place = f"after {sequence.length - sequence.prompt_length} emitted tokens"
    return NoAllowedTokenError(f"what the request allows leaves no token to choose {place}; relax its restrictions.")


def nan_error(num_tokens: int, consequence: str) -> InvalidLogitsError:
    """Return the error of a request whose logits after so many tokens hold a NaN."""
    return InvalidLogitsError(
        f"the target's logits after {num_tokens} tokens hold a NaN, so {consequence}; check its weights, or load it "
        "in a wider dtype."
    )


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
