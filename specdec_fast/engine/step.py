"""One step of the engine: what it drafts, a launched step, and what a finished one commits."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf, isnan
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters import Draft, Drafter, StepResult
from specdec_fast.engine.row_limit import RowLimit, is_out_of_memory
from specdec_fast.errors import DrafterError, InvalidLogitsError, NoAllowedTokenError, RequestError, StepError
from specdec_fast.ops import INVALID_TOKEN
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import FinishReason, StageTimer, TokenScores
from specdec_fast.runner.verification import Outcome, Verification
from specdec_fast.speculation_length import LengthPolicy, StepObservation


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


def draft_limits(policy: LengthPolicy, batch: list[Sequence]) -> list[int]:
    """Return how many draft tokens each sequence may get: the policy's number, or the request's if that is smaller."""
    limits = policy.checked_limits(batch)
    most = [sequence.params.num_draft_tokens for sequence in batch]
    return [k if m is None else min(k, m) for k, m in zip(limits, most, strict=True)]


def may_draft(sequence: Sequence) -> bool:
    """Return whether a sequence may have draft tokens in a step: not before its first token, nor with a prompt's rows.

    So no drafting delays a first token, and the steps of a request do not depend on which rows its prompt has in one.
    """
    return sequence.num_uncomputed == 1 and sequence.length > sequence.prompt_length


def expect_max_nodes(drafter: Drafter) -> None:
    """Raise a DrafterError if the largest number of nodes of a drafter's trees is not an integer from 0 on."""
    most = drafter.max_nodes
    if not isinstance(most, int) or not 0 <= most < 2**31:
        raise DrafterError(f"a drafter's max_nodes is {most!r}; expected an integer from 0 on, 0 if it drafts chains.")


def measured_seconds(drafter: Drafter, row_counts: list[int]) -> dict[int, float] | None:
    """Return ``forward_seconds`` of a drafter; a DrafterError if they are not None or finite seconds by number."""
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


def propose(
    drafter: Drafter, policy: LengthPolicy, batch: list[Sequence], limits: list[int], node_limits: list[int]
) -> tuple[Draft, list[int]]:
    """Ask a drafter for at most ``limits[i]`` tokens of sequence i, and keep those that are worth their rows.

    Args:
        drafter: not called if all limits are 0 (every sequence is at its last token, or K is 0). It does not see
            sequences that may not draft yet (``may_draft``): their hidden states may not be known.
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
    shown = [i for i, sequence in enumerate(batch) if may_draft(sequence)]
    if len(shown) == len(batch):
        return _checked_draft(drafter, policy, batch, limits, node_limits)
    draft, depths_of_shown = _checked_draft(
        drafter, policy, [batch[i] for i in shown], [limits[i] for i in shown], [node_limits[i] for i in shown]
    )
    counts = [0] * len(batch)
    depths = [0] * len(batch)
    for i, count, depth in zip(shown, draft.num_draft_tokens, depths_of_shown, strict=True):
        counts[i] = count
        depths[i] = depth
    return replace(draft, num_draft_tokens=counts), depths


def _checked_draft(
    drafter: Drafter, policy: LengthPolicy, batch: list[Sequence], limits: list[int], node_limits: list[int]
) -> tuple[Draft, list[int]]:
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
    drafted = zip(step.draft.num_draft_tokens, step.depths, strict=True)
    emitted = []
    for sequence, counts, emission, own, values in zip(step.batch, drafted, emissions, rows, scores, strict=True):
        if sequence.request_id in live:
            scored = emission if values is None else _cut_without_score(emission, values)
            emitted.append((sequence, commit_emission(sequence, *counts, scored, values)))
            if scored[-1] == INVALID_TOKEN and sequence.finish_reason is None:
                is_whole = scored is emission
                sequence.fail(_why_no_token(step.verification, own[-1], sequence) if is_whole else _no_score(sequence))
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


def commit_emission(
    sequence: Sequence, num_draft_tokens: int, depth: int, emission: list[int], scores: TokenScores | None
) -> list[int]:
    """Commit the emission of one sequence, without an ``INVALID_TOKEN`` at its end.

    Returns the committed tokens. ``depth`` is that of the draft: of a chain, the number of its tokens.
    """
    num_accepted = len(emission) - 1
    emission = emission if emission[-1] != INVALID_TOKEN else emission[:-1]
    if not emission:
        return []
    logprobs, top_logprobs = (None, None) if scores is None else (scores.logprobs, scores.top_logprobs)
    return sequence.append_emission(num_draft_tokens, num_accepted, emission, logprobs, depth, top_logprobs)


def nan_error(num_tokens: int, consequence: str) -> InvalidLogitsError:
    """Return the error of a request whose logits after so many tokens hold a NaN."""
    return InvalidLogitsError(
        f"the target's logits after {num_tokens} tokens hold a NaN, so {consequence}; check its weights, or load it "
        "in a wider dtype."
    )


def commit_to_drafter(
    drafter: Drafter,
    step: Step,
    rows: list[Many[int]],
    emitted: Iterable[tuple[Sequence, list[int]]],
    row_limit: RowLimit,
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
            drafter.commit(list(unfinished), StepResult(list(unfinished.values()), hidden_states))
    except Exception as error:
        row_limit.recover(error, list(unfinished), drafter)  # raises it, if it says something else
        return list(unfinished)
    if row_limit.most is not None:
        row_limit.passed()
    elif ended:  # where memory is short, less is kept
        _commit_ended(drafter, ended, hidden_states)
    return []


def _commit_ended(drafter: Drafter, ended: dict[Sequence, Many[int]], hidden_states: Tensor | None) -> None:
    try:
        drafter.commit_ended(list(ended), StepResult(list(ended.values()), hidden_states))
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def release(drafter: Drafter, policy: LengthPolicy, sequences: list[Sequence]) -> None:
    """Let a drafter and a policy forget sequences; an error for one of them leaves nothing of the others behind."""
    with ExitStack() as stack:
        for sequence in sequences:
            stack.callback(drafter.release, sequence)
            stack.callback(policy.forget, sequence)


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
