"""How likely draft tokens are to be accepted, from what was accepted so far: a sequence's own history and the run's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.base import StepObservation, num_at_least

_FIRST_GUESS, _GUESS_TOKENS = 0.95, 4.0  # an optimistic prior: acceptance is observed only by drafting
_RUN_TOKENS = 16.0  # what the run's history weighs against a sequence's own, in draft tokens
_PROFILE_TOKENS = 16.0  # what it takes, in accepted tokens, for a place of a draft to be told from the others
_OWN_WINDOW, _RUN_WINDOW, _PROFILE_WINDOW = 32.0, 128.0, 512.0  # draft tokens that are remembered; older ones fade
_LEAST_KEPT = 0.9  # of a full window per step: ten steps of a large batch are remembered, however many tokens
_FADE = 0.994  # of a history per step in which it is not added to: half in 115 steps


@dataclass
class _History:
    """Draft tokens accepted, of those tried; what is added pushes out as much, once ``window`` is full."""

    window: float
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: int, tried: int) -> None:
        if self.tried > self.window:
            self.fade(max(_LEAST_KEPT, 1 - tried / self.window))
        self.accepted += accepted
        self.tried += tried

    def fade(self, keep: float) -> None:
        self.accepted *= keep
        self.tried *= keep

    def estimate(self, guess: float, weight: float) -> float:
        return (self.accepted + guess * weight) / (self.tried + weight)


class Acceptance:
    """Estimates, for every sequence and place in its draft, the probability that the token there is accepted.

    A token counts as tried if all before it were accepted, so ``accepted / tried`` is the maximum-likelihood estimate
    of the probability given that those before it were. That of a sequence is drawn towards the run's, the stronger the
    shorter its history is. All sequences share a profile over the places: what was accepted there, over what was
    expected of the sequences that came so far. Only the past is used.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._own: dict[Sequence, _History] = {}
        self._run = _History(_RUN_WINDOW)
        self._proposals = _History(_RUN_WINDOW)  # proposed, of those asked for
        self._accepted = [0.0] * most  # by place
        self._expected = [0.0] * most

    @property
    def num_tried(self) -> float:
        """Draft tokens that the run's estimate rests on."""
        return self._run.tried

    @property
    def average(self) -> float:
        """The run's estimate: of a draft token, given that those before it were accepted."""
        return self._run.estimate(_FIRST_GUESS, _GUESS_TOKENS)

    @property
    def share_proposed(self) -> float:
        """Of the draft tokens asked for, those proposed; a drafter may have nothing to say."""
        return self._proposals.estimate(1.0, 1.0)

    def is_known(self, sequence: Sequence) -> bool:
        """Whether a sequence's own history outweighs the run's."""
        return sequence in self._own and self._own[sequence].tried >= _RUN_TOKENS

    def observe(self, step: StepObservation) -> None:
        """Learn from a step in which something was asked for."""
        average, total = self.average, 0
        expected = [0.0] * (self.most + 1)  # of the sequences whose last token tried stands at a place
        for sequence, count, accepted in zip(step.batch, step.num_draft_tokens, step.num_accepted, strict=True):
            if count:
                own = self._own.get(sequence) or self._own.setdefault(sequence, _History(_OWN_WINDOW))
                tried = min(accepted + 1, count)
                expected[tried - 1] += own.estimate(average, _RUN_TOKENS)
                own.add(accepted, tried)
                total += tried
        self._run.add(sum(step.num_accepted), total)
        self._proposals.add(sum(step.num_draft_tokens), sum(step.limits))
        keep = 1 - min(0.5, total / _PROFILE_WINDOW)
        taken = num_at_least(step.num_accepted, self.most)
        for place in range(self.most - 1, -1, -1):
            expected[place] += expected[place + 1]
            self._expected[place] = keep * self._expected[place] + expected[place]
            self._accepted[place] = keep * self._accepted[place] + taken[place]

    def probabilities(self, batch: list[Sequence]) -> list[list[float]]:
        """Return ``[B, most]``: at place j, the probability that draft token j and all before it are accepted."""
        average, nothing = self.average, _History(_OWN_WINDOW)
        profile = [
            (accepted + _PROFILE_TOKENS) / (expected + _PROFILE_TOKENS)
            for accepted, expected in zip(self._accepted, self._expected, strict=True)
        ]
        found = []
        for sequence in batch:
            own = self._own.get(sequence, nothing).estimate(average, _RUN_TOKENS)
            found.append(list(accumulate([min(own * factor, 1.0) for factor in profile], mul)))
        return found

    def fade(self, batch: list[Sequence], lengths: list[int], num_steps: int) -> None:
        """Let the history of those that are not drafted for fade, so that the run's takes its place."""
        for sequence, length in zip(batch, lengths, strict=True):
            if not length and sequence in self._own:
                self._own[sequence].fade(_FADE**num_steps)

    def discount(self) -> None:
        """Trust the run's history half as much: what has just been seen is not what it says."""
        self._run.fade(0.5)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's own history."""
        self._own.pop(sequence, None)
