"""How many nodes of a batch's trees are verified: those whose expected tokens are worth their rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import exp

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
        self._accepted, self._tried = [_PRIOR_NODES * rate for rate in own], [_PRIOR_NODES] * _NUM_BINS
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

    def best_nodes(self, scores: list[float], num_sequences: int, seconds: Callable[[int], float]) -> int:
        """Return R, the number of nodes with which a step emits the most tokens per second, the best scores first.

        R maximises ``(B + sum of the probabilities of R nodes) / seconds(R)``.

        Args:
            scores: of the nodes of all sequences, falling.
            num_sequences: B.
            seconds: of a step that verifies so many nodes.

        """
        tokens, best, most = float(num_sequences), 0, num_sequences / seconds(0)
        for count, score in enumerate(scores, start=1):
            tokens += self._rates[_bin_of(score)]
            speed = tokens / seconds(count)
            if speed > most:
                best, most = count, speed
        return best


def _bin_of(score: float) -> int:
    return min(int(-score / _BIN), _NUM_BINS - 1) if score > float("-inf") else _NUM_BINS - 1
