"""The contract of a K policy. To add one, copy ``fixed.py`` and name it in ``speculation_length/__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import NamedTuple, final

from specdec_fast.errors import LengthPolicyError
from specdec_fast.request.sequence import Sequence


class StepObservation(NamedTuple):
    """What one step did, per sequence in batch order, and how long it took.

    Attributes:
        batch: its ``B`` sequences; they may have ended with it.
        limits: draft tokens asked for.
        num_draft_tokens: draft tokens proposed and verified; of a tree, its depth.
        num_accepted: draft tokens accepted.
        draft_seconds: wall-clock time of the drafter, including its prefill of new sequences.
        verify_seconds: wall-clock time of the target's forward alone. On a GPU both may only have been queued.
        other_seconds: wall-clock time of everything else: laying out the forward, accept, which waits for it, commit,
            and what the engine's caller did with the tokens of the step before.
        may_branch: whether a tree was allowed more nodes than a chain has tokens; False if memory or KV pages were
            short.
        scores: of each sequence's draft tokens that were verified (``Draft.scores``); None if the drafter has none.
        accepted_nodes: if there are scores, the indices of the accepted draft tokens among these, per sequence.
    """

    batch: list[Sequence]
    limits: list[int]
    num_draft_tokens: list[int]
    num_accepted: list[int]
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    may_branch: bool = False
    scores: list[list[float]] | None = None
    accepted_nodes: list[list[int]] | None = None


class Profiler(NamedTuple):
    """Times the forwards of an engine's models on demand."""

    max_batch_size: int  # sequences in one step at most
    is_asynchronous: bool  # whether forwards are only queued (on a GPU), so that only a whole step's time is known
    # takes row counts; returns the seconds of one target forward, by row count
    verify_seconds: Callable[[list[int]], dict[int, float]]
    # takes numbers of sequences; returns the seconds of drafting one token for each of them, by number, and at 0 what a
    # proposal costs in addition; None if the drafter does not know
    draft_seconds: Callable[[list[int]], dict[int, float] | None]
    max_nodes: int = 0  # largest number of nodes of the drafter's trees; 0 if it drafts chains
    has_scores: bool = False  # whether the nodes of these trees, or the tokens of these chains, have scores

    @property
    def scores_chains(self) -> bool:
        """Whether the drafter has chains alone, and their tokens have scores."""
        return self.has_scores and not self.max_nodes


class LengthPolicy(ABC):
    """Chooses how many draft tokens each sequence of a step may get. No choice changes a token of an output.

    For a tree of draft tokens it chooses the depth, whether the tree may have more nodes than a chain has tokens, and
    which of its nodes are verified.

    The engine calls ``prepare`` when it is made, ``limits`` before a step, ``least_score`` when the tokens of the step
    have been drafted, ``observe`` after it, and ``forget`` when a sequence leaves. An instance serves one engine.

    A sequence is not drafted for before its first token, whatever its K. A step whose forward computes rows of prompts
    is not observed; for a policy that overrides ``observe``, that is only a step in which nothing may be drafted.

    Attributes:
        max_draft_tokens: the largest K that it gives.
        may_branch: whether a tree of the next step may have more nodes than a chain has tokens; read after ``limits``.
    """

    max_draft_tokens: int
    may_branch: bool = True

    @abstractmethod
    def limits(self, batch: list[Sequence]) -> list[int]:
        """Return K of each sequence of the next step, from 0 to ``max_draft_tokens``.

        K is 0 or less than ``num_remaining`` of the sequence, because one token of a step is the target's own. The
        sequences must not be changed.
        """

    # The hooks below do nothing for a policy that learns nothing.

    def prepare(self, profiler: Profiler) -> None:  # noqa: B027
        """Measure what the policy needs to know, by the functions of ``profiler``."""

    def least_score(self, scores: list[list[float]]) -> float:
        """Return the score from which on draft tokens are verified; the others are dropped.

        ``scores`` are those of each sequence's draft tokens (``Draft.scores``). They never rise from a parent to its
        child, so what is kept contains the parents of each.
        """
        return float("-inf")

    def observe(self, step: StepObservation) -> None:  # noqa: B027
        """Learn how long a step took and what was accepted in it.

        If KV pages or memory ran short, the step had only a part of the batch that ``limits`` received.
        """

    def forget(self, sequence: Sequence) -> None:  # noqa: B027
        """Drop what the policy keeps of a sequence, if anything."""

    @final
    @property
    def learns(self) -> bool:
        """Whether it observes steps."""
        return getattr(self.observe, "__func__", None) is not LengthPolicy.observe

    def checked_limits(self, batch: list[Sequence]) -> list[int]:
        """Return ``limits``, held to the contract.

        Raises:
            LengthPolicyError: ``limits`` is not a list of one int per sequence, or an int is out of range.
        """
        most = self.max_draft_tokens
        limits = self.limits(list(batch))
        if not isinstance(limits, list) or len(limits) != len(batch):
            raise LengthPolicyError(
                f"limits of {type(self).__name__}: {limits!r}; expected a list of {len(batch)} ints."
            )
        for k, sequence in zip(limits, batch, strict=True):
            if type(k) is not int or not 0 <= k <= most or (k and k >= sequence.num_remaining):
                raise LengthPolicyError(
                    f"limits of {type(self).__name__}: {k!r} for a sequence with {sequence.num_remaining} remaining "
                    f"tokens; expected an int from 0 to max_draft_tokens={most}, and less than the remaining tokens."
                )
        return limits

    def checked_least_score(self, scores: list[list[float]]) -> float:
        """Return ``least_score``, held to the contract.

        Raises:
            LengthPolicyError: ``least_score`` is not a number.
        """
        least = self.least_score([list(own) for own in scores])
        if not isinstance(least, (int, float)) or not -inf <= least <= inf:  # NaN
            raise LengthPolicyError(
                f"least_score of {type(self).__name__}: {least!r}; expected a number, such as -inf to verify all."
            )
        return least
