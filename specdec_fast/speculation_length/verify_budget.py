"""How many nodes of a batch's trees are verified: those whose expected tokens are worth their rows."""

from __future__ import annotations

from itertools import accumulate
from math import exp, inf

from specdec_fast.speculation_length.step_costs import StepCosts

_BIN = 0.5  # of a score: nodes whose probabilities differ by less than a factor of 1.65 share a hit rate
_NUM_BINS = 16
_PRIOR_NODES = 8.0  # weight of the drafter's own estimate in each bin
_WINDOW = 256.0  # nodes that a bin remembers
_RATE = 0.1  # of a difference that the seconds of a step follow


class HitRates:
    """How often nodes of a score are accepted: the drafter's estimates, corrected by what was accepted.

    Every verified node counts, because it is known of each whether it was accepted.
    """

    def __init__(self) -> None:
        own = [exp(-_BIN * (i + 0.5)) for i in range(_NUM_BINS)]
        self._accepted = [_PRIOR_NODES * rate for rate in own]
        self._tried = [_PRIOR_NODES] * _NUM_BINS
        self._rates = own

    def add(self, scores: list[float], accepted: list[int]) -> None:
        """Add the verified nodes of one sequence, and which of them were accepted (as indices)."""
        hits = set(accepted)
        for node, score in enumerate(scores):
            i = _bin_of(score)
            keep = 1 - 1 / _WINDOW
            self._tried[i] = keep * self._tried[i] + 1
            self._accepted[i] = keep * self._accepted[i] + (node in hits)

    def update(self) -> None:
        """Compute the rates anew; a lower score never has a higher rate, so the order of nodes is that of scores."""
        rates = [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]
        self._rates = list(accumulate(rates, min))

    def __call__(self, score: float) -> float:
        """Return the probability that a node of this score is accepted."""
        return self._rates[_bin_of(score)]


class VerifyBudget:
    """Decides how many nodes of a batch's trees are verified.

    The likeliest R nodes of all sequences are verified. A score never rises from a parent to its child, so they are
    closed under parents. R nodes emit ``B + sum of their probabilities`` tokens, in the seconds of the target's forward
    at ``B + R`` rows and those that the steps of these trees took besides. The R of the most tokens per second is
    taken, 0 included.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._rates = HitRates()
        self._rest: dict[tuple[int, int], float] = {}  # seconds of a step besides the target's forward, by K and B

    def least_score(self, scores: list[list[float]], k: int) -> float:
        """Return the score of the last node of trees of number k that is worth its row; infinity if none is."""
        size = len(scores)
        rest = self._rest.get((k, size.bit_length()))
        if rest is None:
            rest = max(0.0, self._costs.profile(size)[k] - self._costs.verify(self._costs.rows(size, k)))
        tokens = float(size)
        best = inf
        most = tokens / (rest + self._costs.verify(size))
        falling = sorted((score for own in scores for score in own), reverse=True)
        for count, score in enumerate(falling, 1):
            tokens += self._rates(score)
            speed = tokens / (rest + self._costs.verify(size + count))
            if speed > most:
                best = score
                most = speed
        return best

    def observe(self, k: int, scores: list[list[float]], accepted: list[list[int]], seconds: float) -> None:
        """Learn from one step, of trees (see ``StepCosts``).

        Args:
            k: the number of the trees as a K.
            scores: of each sequence's verified nodes.
            accepted: which of them were accepted.
            seconds: of the step.
        """
        for own, hits in zip(scores, accepted, strict=True):
            self._rates.add(own, hits)
        self._rates.update()
        size = len(scores)
        key = (k, size.bit_length())
        rest = max(0.0, seconds - self._costs.verify(size + sum(map(len, scores))))
        before = self._rest.setdefault(key, rest)
        self._rest[key] = before + _RATE * (min(rest, 2 * before) - before)


def _bin_of(score: float) -> int:
    return min(int(-score / _BIN), _NUM_BINS - 1) if score > -inf else _NUM_BINS - 1
