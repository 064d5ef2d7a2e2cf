"""What a forward costs at any number of rows: measured beforehand at some, corrected by what the run's steps take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, log

import numpy as np

_LARGEST_SURPRISE = 0.4  # of the logarithm of a ratio: what exceeds it was the machine being busy with other things
_OVERALL_RATE, _COUNT_RATE = 0.1, 0.02  # share of a surprise that is taken over, in the long run


class CostCurve:
    """Seconds as a function of rows: linear between the measured counts, and beyond the last with the last slope.

    Contexts grow, machines get busy, and a step does more than a forward. So the measured seconds are multiplied by a
    factor for all counts, which follows quickly what steps take, and one for each count, which follows slowly: the
    difference between plain and drafting steps outlives the time in which only one of them is seen.

    Args:
        seconds: by rows, at one count at least.
        multiple: row counts are rounded up to a multiple of it (``RowRule``).
        is_measured: False if ``seconds`` are but a guess, so that the first observation at each count decides.

    """

    def __init__(self, seconds: Mapping[int, float], multiple: int = 1, is_measured: bool = True) -> None:
        counts = sorted(seconds)
        values = [max(seconds[count], 1e-9) for count in counts]
        values = np.minimum.accumulate(values[::-1])[::-1].tolist()  # noise only adds
        slope = values[-1] / counts[-1]
        if len(counts) > 1:
            slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
        far = 64 * counts[-1]
        self._multiple = multiple
        self._counts = [*counts, far]
        self._measured = [*values, values[-1] + slope * (far - counts[-1])]
        self._overall, self._num_observed = 0.0, 0  # logarithm of the factor
        self._at_count = [0.0] * len(self._counts)
        self._num_at_count = [0] * len(self._counts)
        self._is_measured = is_measured
        self._cache: dict[int, float] = {}

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of a forward at each number of ``rows``, corrected; nothing takes none."""
        factors = np.exp(np.array(self._at_count) + self._overall)
        # More rows do not cost less: what says so is noise, and would make useless draft tokens look cheap.
        values = np.minimum.accumulate((factors * self._measured)[::-1])[::-1]
        return np.where(rows > 0, np.interp(rows + -rows % self._multiple, self._counts, values), 0.0)

    @property
    def factor(self) -> float:
        """By how much everything takes longer than it was measured to."""
        return exp(self._overall)

    def measured(self, rows: int) -> float:
        """Return the seconds at ``rows`` before any correction."""
        if rows not in self._cache:
            padded = rows + -rows % self._multiple
            self._cache[rows] = float(np.interp(padded, self._counts, self._measured)) if rows else 0.0
        return self._cache[rows]

    def observe(self, rows: int, ratio: float) -> None:
        """Learn that forwards of about ``rows`` rows took ``ratio`` times the measured seconds."""
        if ratio <= 0:
            return
        node = self._nearest(rows + -rows % self._multiple)
        surprise = log(ratio) - self._overall - self._at_count[node]
        if not (self._is_measured or self._num_observed):
            self._overall = surprise
        elif not (self._is_measured or self._num_at_count[node]):
            self._at_count[node] = surprise
        else:
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
            self._overall += surprise * max(_OVERALL_RATE, 1 / (self._num_observed + 3))
            self._at_count[node] += surprise * max(_COUNT_RATE, 0.25 / (self._num_at_count[node] + 2))
        self._num_observed += 1
        self._num_at_count[node] += 1

    def _nearest(self, rows: int) -> int:
        above = bisect_left(self._counts, rows, hi=len(self._counts) - 1)
        return above - (above > 0 and self._counts[above] - rows > rows - self._counts[above - 1])


def unknown_cost(most_rows: int) -> CostCurve:
    """Return the cost of what has not been measured: next to nothing, until the first steps tell."""
    return CostCurve(dict.fromkeys(row_counts(most_rows), 1e-6), is_measured=False)


def row_counts(largest: int) -> list[int]:
    """Return the row counts to measure: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to ``largest``."""
    doubled = [2**i for i in range(largest.bit_length())]
    return sorted({n for power in doubled for n in (power, power * 3 // 2) if n < largest} | {largest})
