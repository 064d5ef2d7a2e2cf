"""A race between a few K: interleaved blocks of steps, of which only the tokens and the seconds count."""

from __future__ import annotations

from math import hypot, inf, sqrt
from statistics import median
from typing import NamedTuple

_MARGIN = 1.03  # by which drafting must be faster than plain decoding
_LEAST_ROUNDS = 8
_MOST_ROUNDS = 32
_ENOUGH = 512  # steps of single sequences per arm
_TOKENS_DEVIATION = 0.5  # of the tokens that a sequence emits in a step that drafts, over their mean, at most
_SECONDS_DEVIATION = 0.3  # of the seconds of a step in a single round
_SLOWER = 2.0  # deviations by which an arm is slower than the fastest beyond chance


class CountedStep(NamedTuple):
    """The sequences of a step's batch, the tokens that they emitted, and the seconds that it took."""

    size: int
    tokens: int
    seconds: float


class Race:
    """Compares the speeds of arms, each a K, and drops one as soon as it is slower than another beyond chance.

    Tokens per step are pooled. Seconds are those of the median step of a block, and arms are compared within rounds of
    one block each, of which the median counts: a machine that is slow for a while slows a round, or a block of it.
    ``prefill`` are seconds that each token of a drafting sequence costs besides: the drafter computes its prompt.

    Attributes:
        arms: those that may win.
        num_rounds: that have ended.
        has_changed: whether a block emitted less than half of the tokens that were expected: no arm wins.
    """

    def __init__(self, arms: list[int], prefill: float = 0.0) -> None:
        self.arms = arms
        self.num_rounds = 0
        self.has_changed = False
        self._prefill = prefill
        self._tokens = dict.fromkeys(arms, 0)
        self._steps = dict.fromkeys(arms, 0)  # of single sequences
        self._seconds: dict[int, list[float]] = {arm: [] for arm in arms}  # of a step, by round; 0.0 if unknown
        self._lengths = dict.fromkeys(arms, 0)  # of all blocks, in steps
        self._switching = 0.0  # seconds that the first steps of blocks took longer than the others

    def add_block(self, arm: int, steps: list[CountedStep]) -> None:
        """Add a block; its first step shows what the change costs: cold caches, and a drafter that catches up."""
        counted = steps[1:]
        usual = median([step.seconds for step in counted] or [0.0])
        tokens = sum(step.tokens for step in counted)
        num_steps = sum(step.size for step in counted)
        self.has_changed |= tokens < num_steps * self.tokens(arm) / 2
        self._tokens[arm] += tokens
        self._steps[arm] += num_steps
        self._seconds[arm].append(usual)
        self._lengths[arm] += len(steps)
        self._switching += max(0.0, steps[0].seconds - usual) if usual else 0.0

    def end_round(self) -> bool:
        """Drop arms when each has had a block; return whether the race goes on."""
        self.num_rounds += 1
        speeds = self.speeds()
        best = self.best()
        self.arms = [arm for arm in self.arms if speeds[arm] >= speeds[best] * self._least_ratio(arm, best)]
        is_known = self.num_rounds >= _LEAST_ROUNDS and min(self._steps[arm] for arm in self.arms) >= _ENOUGH
        return len(self.arms) > 1 and not is_known and self.num_rounds < _MOST_ROUNDS

    def best(self) -> int:
        """Return the fastest arm of those that are left; of those that are as fast, the smallest."""
        speeds = self.speeds()
        return max(sorted(self.arms), key=speeds.__getitem__)

    def speeds(self) -> dict[int, float]:
        """Return the tokens per second of a sequence, by arm, of drafting ones over the margin; 0.0 if unknown."""
        reference = self.arms[-1]
        speeds = {}
        for arm in self._seconds:
            tokens = self.tokens(arm)
            seconds = self.seconds(reference) * median(self._ratios(arm, reference) or [0.0])
            costs = _MARGIN * (seconds + self._prefill * tokens) if arm else seconds
            speeds[arm] = tokens / costs if seconds else 0.0
        return speeds

    def seconds(self, arm: int) -> float:
        """Return the usual seconds of a step; 0.0 if unknown."""
        return median([seconds for seconds in self._seconds.get(arm, []) if seconds] or [0.0])

    def tokens(self, arm: int) -> float:
        """Return the tokens that a sequence emits in a step; 0.0 if unknown."""
        return self._tokens[arm] / (self._steps[arm] or 1)

    def lost(self) -> float:
        """Return the seconds that the race has lost: those of changes, and those by which slower arms lag."""
        speeds = self.speeds()
        best = max(speeds.values()) or inf
        lags = (self._lengths[arm] * self.seconds(arm) * (1 - speed / best) for arm, speed in speeds.items())
        return self._switching + sum(lags)

    def _ratios(self, arm: int, other: int) -> list[float]:
        """Return the seconds of a step of one arm over those of another, by round in which both had a block."""
        pairs = zip(self._seconds[arm], self._seconds[other], strict=False)
        return [own / others for own, others in pairs if own and others]

    def _least_ratio(self, arm: int, best: int) -> float:
        """Return the ratio of two speeds below which it is not by chance."""
        if not (ratios := self._ratios(arm, best)):
            return 0.0
        middle = median(ratios)
        spread = 2 * median(abs(ratio - middle) for ratio in ratios) / middle
        of_seconds = spread / sqrt(len(ratios)) + _SECONDS_DEVIATION / len(ratios)
        of_tokens = [_TOKENS_DEVIATION / sqrt(self._steps[each]) for each in (arm, best) if each]
        return 1 - _SLOWER * hypot(of_seconds, *of_tokens)
