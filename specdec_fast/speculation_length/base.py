"""The contract of what chooses K. To add one: copy ``fixed.py``, and name it in ``speculation_length/__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from specdec_fast.request.sequence import Sequence


class StepObservation(NamedTuple):
    """What one step did, per sequence in batch order, and how long it took.

    Attributes:
        batch: its ``B`` sequences; they may have ended with it.
        limits: draft tokens asked for.
        num_draft_tokens: draft tokens proposed and verified.
        num_accepted: of them.
        draft_seconds: wall-clock time of the drafter.
        verify_seconds: of the target's forward alone. On a GPU both may have been queued only.
        other_seconds: of everything else: laying the forward out, accept, which waits for it, and commit.

    """

    batch: list[Sequence]
    limits: list[int]
    num_draft_tokens: list[int]
    num_accepted: list[int]
    draft_seconds: float
    verify_seconds: float
    other_seconds: float


def num_at_least(counts: Iterable[int], most: int) -> list[int]:
    """Return how many of ``counts`` are at least 1, 2, ... ``most``; microseconds, where NumPy takes tens."""
    exactly = [0] * (most + 1)
    for count in counts:
        exactly[count] += 1
    total, found = 0, []
    for count in range(most, 0, -1):
        total += exactly[count]
        found.append(total)
    return found[::-1]


class LengthPolicy(ABC):
    """Chooses how many draft tokens each sequence of a step may get. It changes when a token comes, never which (I6).

    The engine calls ``limits`` before a step, ``observe`` after it, and ``forget`` when a sequence leaves.
    """

    @abstractmethod
    def limits(self, batch: list[Sequence], no_refill: bool = False) -> list[int]:
        """Return K of each sequence, 0 included; less than ``num_remaining``, because one token is the target's own.

        Args:
            batch: the sequences of the next step.
            no_refill: whether nobody will take the place of one that ends before the others do.

        """

    # The hooks below do nothing for whoever learns nothing.

    def observe(self, step: StepObservation) -> None:  # noqa: B027
        """Learn what a step took and what was accepted in it."""

    def forget(self, sequence: Sequence) -> None:  # noqa: B027
        """Drop what is kept of a sequence; there may be nothing."""
