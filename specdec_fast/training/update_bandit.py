"""Which part of a drafter to update while it serves: a bandit over costs and gains (Shi et al., arXiv 2605.07243).

The paper publishes no formula. Here the gain of an arm is the change of the tokens that a step emits, after the arm was
taken, beyond the change without an update. Gains are estimated by discounted UCB (Garivier and Moulines, arXiv
0805.3415, section 2), because a drafter that has learnt much gains less. They become seconds by the traffic that is
expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

SKIP = "skip"
HEAD = "head"
FULL = "full"
ARMS = (SKIP, HEAD, FULL)
_DISCOUNT = 0.98  # of earlier gains, per choice
_LEAST_DEVIATION = 0.005  # of gains, in tokens per step


@dataclass
class _Arm:
    """Discounted sums over the times that an arm was taken, and the seconds of its latest update."""

    count: float = 0.0
    gain: float = 0.0
    square: float = 0.0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.gain / self.count if self.count else 0.0

    @property
    def spread(self) -> float:
        """The sum of the squared deviations from the mean."""
        return self.square - self.count * self.mean**2


class UpdateBandit:
    """Chooses to skip an update, to update the heads of a drafter, or all of it.

    Call ``observe`` after a call of the engine, then ``choose``, then ``updated`` if something was updated. Updates
    take ``time_share`` of the seconds of all calls at most.
    """

    def __init__(self, time_share: float) -> None:
        self._time_share = time_share
        self._arms = {arm: _Arm() for arm in ARMS}
        self._last: str | None = None
        self.tokens_per_step = 0.0  # of the latest call
        self.seconds_serving = 0.0  # of all calls
        self.seconds_updating = 0.0  # of all updates
        self.num_tokens = 0  # emitted in all calls

    @property
    def seconds_left(self) -> float:
        """The seconds that updates may take now."""
        return self._time_share * self.seconds_serving - self.seconds_updating

    def observe(self, tokens_per_step: float, num_tokens: int, seconds: float) -> None:
        """Learn what a call showed of the arm that was taken before it.

        ``tokens_per_step`` is what a sequence emitted in a step, on average; all sequences emitted ``num_tokens``.
        """
        if self.tokens_per_step and self._last is not None:
            for arm in self._arms.values():
                arm.count *= _DISCOUNT
                arm.gain *= _DISCOUNT
                arm.square *= _DISCOUNT
            taken = self._arms[self._last]
            gain = tokens_per_step - self.tokens_per_step
            taken.count += 1
            taken.gain += gain
            taken.square += gain**2
        self.tokens_per_step = tokens_per_step
        self.num_tokens += num_tokens
        self.seconds_serving += seconds

    def choose(self, tokens_ahead: int) -> str:
        """Return the arm whose update is expected to save the most seconds, those of the update subtracted.

        ``tokens_ahead`` is how many tokens the engine is still expected to emit.
        """
        saved = {arm: self._seconds_saved(arm, tokens_ahead) for arm in ARMS if self._is_affordable(arm)}
        self._last = max(saved, key=saved.__getitem__)
        return self._last

    def updated(self, seconds: float) -> None:
        """Learn what the update of the arm that was chosen took."""
        assert self._last is not None
        self._arms[self._last].seconds = seconds
        self.seconds_updating += seconds

    def _is_affordable(self, arm: str) -> bool:
        return arm == SKIP or self.seconds_left > self._arms[arm].seconds

    def _seconds_saved(self, arm: str, tokens_ahead: int) -> float:
        """Return the seconds by which the tokens ahead come earlier, if the arm gains what it may gain at best."""
        if not self.num_tokens:
            return 0.0 if arm == SKIP else -1.0
        before = self.tokens_per_step
        after = max(1.0, before + self._bound(arm) - self._arms[SKIP].mean)
        seconds_ahead = tokens_ahead * self.seconds_serving / self.num_tokens
        return seconds_ahead * (1 - before / after) - self._arms[arm].seconds

    def _bound(self, arm: str) -> float:
        """Return the upper confidence bound on the gain of an arm; that of an arm never taken exceeds all others."""
        chosen = self._arms[arm]
        arms = self._arms.values()
        if not chosen.count:
            return 0.0 if arm == SKIP else 1.0
        total = sum(each.count for each in arms)
        deviation = max(_LEAST_DEVIATION, sqrt(max(0.0, sum(each.spread for each in arms)) / total))
        return chosen.mean + deviation * sqrt(2 * log(max(total, 1.0)) / chosen.count)
