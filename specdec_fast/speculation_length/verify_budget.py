"""How many nodes of a batch's trees are verified: those whose expected tokens are worth their rows."""

from __future__ import annotations

from itertools import accumulate
from math import exp

from specdec_fast.speculation_length.step_costs import StepCosts

_BIN = 0.5  # of a score: nodes whose probabilities differ by less than a factor of 1.65 share a hit rate
_NUM_BINS = 16
_PRIOR_NODES = 8.0  # weight of the drafter's own estimate in each bin
_WINDOW = 256.0  # nodes that a bin remembers


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
    closed under parents. R nodes emit ``B + sum of their probabilities`` tokens, in the seconds of a usual step of
    these trees, corrected by what the target's forward costs at ``B + R`` rows. The R of the most tokens per second is
    taken, 0 included.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._rates = HitRates()
        self._counts: list[int] = []  # nodes of the steps since the last choice
        self._key = (0, 0)  # K and B of these
        self._seconds: list[float] = []  # of a step by its number of nodes, as far as they were needed

    def least_score(self, scores: list[list[float]], k: int) -> float:
        """Return the score of the last node of trees of number k that is worth its row; infinity if none is."""
        falling = sorted((score for own in scores for score in own), reverse=True)
        size = len(scores)
        if self._key != (k, size):
            self._key = (k, size)
            self._counts = []
            self._seconds = []
        self._time(len(falling))
        tokens = float(size)
        best = float("inf")
        most = tokens / self._seconds[0]
        for score, seconds in zip(falling, self._seconds[1:], strict=False):
            tokens += self._rates(score)
            if tokens > most * seconds:
                best = score
                most = tokens / seconds
        return best

    def observe(self, k: int, scores: list[list[float]], accepted: list[list[int]], is_usual: bool) -> None:
        """Learn from one step, of trees (see ``StepCosts``).

        Args:
            k: the number of the trees as a K.
            scores: of each sequence's verified nodes.
            accepted: which of them were accepted.
            is_usual: whether ``StepCosts`` learns from the seconds of this step, too.
        """
        for own, hits in zip(scores, accepted, strict=True):
            self._rates.add(own, hits)
        if is_usual and self._key == (k, len(scores)):
            self._counts.append(sum(map(len, scores)))

    def end_round(self) -> None:
        """Take the steps since the last choice into account."""
        self._rates.update()
        if self._counts:
            k, size = self._key
            self._costs.observe_nodes(size, k, sum(self._counts) / len(self._counts))
        self._counts = []
        self._seconds = []

    def _time(self, num_nodes: int) -> None:
        k, size = self._key
        usual = self._costs.verify_seconds(size, self._costs.rows(size, k))
        rest = max(0.0, self._costs.seconds(size)[k] - usual)
        for count in range(len(self._seconds), num_nodes + 1):
            self._seconds.append(rest + self._costs.verify_seconds(size, size + count))


def _bin_of(score: float) -> int:
    return min(int(-score / _BIN), _NUM_BINS - 1) if score > float("-inf") else _NUM_BINS - 1
