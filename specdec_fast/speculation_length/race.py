"""A race between a few K: interleaved blocks of steps, of which only the tokens and the seconds count."""

from __future__ import annotations

from math import inf, sqrt
from statistics import fmean, median

_LEAST_ROUNDS = 8
_MOST_ROUNDS = 64
_ENOUGH = 256  # steps of single sequences per arm
_TOKENS_DEVIATION = 0.5  # of the tokens that a sequence emits in a step that drafts, over their mean, at most
_SECONDS_DEVIATION = 0.3  # of the seconds of a step in a single round
_DEVIATIONS = 2.0  # by which an arm must be slower than the fastest to leave the race


class Race:
    """Compares the speeds of arms, each a K, and drops one as soon as it is slower than another beyond chance.

    Tokens per step are pooled. Seconds are compared within rounds of one block per arm, and the median round counts: a
    machine that is slow for a while slows a whole round, or a block of a round that is not the median.

    Args:
        arms: at least one.
        prefill: seconds that each token of a drafting sequence costs besides, because the drafter computes its prompt.

    Attributes:
        arms: those that may win.
        behind: of the others, the speed over that of the fastest when they were dropped.
        num_rounds: that have ended.
    """

    def __init__(self, arms: list[int], prefill: float = 0.0) -> None:
        self.arms = arms
        self.behind: dict[int, float] = {}
        self._prefill = prefill
        self.num_rounds = 0
        self._tokens = dict.fromkeys(arms, 0)
        self._steps = dict.fromkeys(arms, 0)  # of single sequences
        self._seconds: dict[int, list[float]] = {arm: [] for arm in arms}  # of a step, by round; 0.0 if unknown

    def add_block(self, arm: int, steps: list[tuple[int, int, float]]) -> None:
        """Add steps, each as its number of sequences, the tokens that it emitted, and its seconds."""
        self._tokens[arm] += sum(tokens for _, tokens, _ in steps)
        self._steps[arm] += sum(size for size, _, _ in steps)
        self._seconds[arm].append(fmean(seconds for _, _, seconds in steps) if steps else 0.0)

    def end_round(self) -> bool:
        """Drop arms when each has had a block; return whether the race goes on."""
        self.num_rounds += 1
        speeds = self.speeds()
        best = max(self.arms, key=speeds.__getitem__)
        for arm in self.arms:
            if speeds[arm] < speeds[best] * (1 - _DEVIATIONS * self._deviation(arm, best)):
                self.behind[arm] = speeds[arm] / speeds[best]
        self.arms = [arm for arm in self.arms if arm not in self.behind]
        is_known = self.num_rounds >= _LEAST_ROUNDS and min(self._steps[arm] for arm in self.arms) >= _ENOUGH
        return len(self.arms) > 1 and not is_known and self.num_rounds < _MOST_ROUNDS

    def speeds(self) -> dict[int, float]:
        """Return the tokens per second of a sequence, by the arms that are left; 0.0 if unknown."""
        last = self.arms[-1]
        usual = self.seconds(last)
        speeds = {}
        for arm in self.arms:
            tokens = self.tokens(arm)
            if ratios := self._ratios(arm, last):
                least = 1.0 if last == 0 else 0.0  # a step that drafts takes no less time than one that does not
                seconds = usual * max(least, median(ratios)) + self._prefill * tokens * (arm > 0)
            speeds[arm] = tokens / seconds if ratios else 0.0
        return speeds

    def seconds(self, arm: int) -> float:
        """Return the usual seconds of a step; 0.0 if unknown."""
        return median([seconds for seconds in self._seconds.get(arm, []) if seconds] or [0.0])

    def tokens(self, arm: int) -> float:
        """Return the tokens that a sequence emits in a step."""
        return self._tokens.get(arm, 0) / max(1, self._steps.get(arm, 0))

    def lost(self) -> float:
        """Return the seconds that the race lost if its blocks have one step."""
        speeds = self.speeds()
        best = max(speeds.values())
        ratios = self.behind | {arm: speed / best for arm, speed in speeds.items() if best}
        return sum(len(self._seconds[arm]) * self.seconds(arm) * (1 - ratio) for arm, ratio in ratios.items())

    def _ratios(self, arm: int, other: int) -> list[float]:
        """Return the seconds of a step of one arm over those of another, by round."""
        pairs = zip(self._seconds[arm], self._seconds[other], strict=True)
        return [own / others for own, others in pairs if own and others]

    def _deviation(self, arm: int, best: int) -> float:
        """Return the standard deviation of the ratio of two speeds, roughly."""
        ratios = self._ratios(arm, best)
        if not ratios:
            return inf
        num = len(ratios)
        middle = median(ratios)
        of_seconds = 2 * median(abs(ratio - middle) for ratio in ratios) / middle / sqrt(num) + _SECONDS_DEVIATION / num
        of_tokens = [_TOKENS_DEVIATION / sqrt(self._steps[each]) for each in (arm, best) if each]
        return sqrt(of_seconds**2 + sum(each**2 for each in of_tokens))
