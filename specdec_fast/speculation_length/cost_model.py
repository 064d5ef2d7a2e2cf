"""What a forward costs at any number of rows: measured beforehand at some, corrected by what the run's steps take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import exp, log
from typing import NamedTuple

from specdec_fast.speculation_length.base import Profiler

_LARGEST_SURPRISE = 0.4  # of the logarithm of a ratio: what exceeds it was the machine being busy with other things
_OVERALL_RATE, _COUNT_RATE = 0.1, 0.02  # share of a surprise that is taken over, in the long run


_CATCHING_UP = 64  # rows at which a draft model's forward is measured for the price of a prompt
_ENOUGH_SECONDS = 0.5  # of measurements in all; beyond it there was no time to repeat them


class CostCurve:
    """Seconds as a function of rows: linear between the measured counts, and beyond the last with the last slope.

    Contexts grow, machines get busy, and a step does more than a forward. So the measured seconds are multiplied by a
    factor for all counts, which follows quickly what steps take, and one for each count, which follows slowly: the
    difference between plain and drafting steps outlives the time in which only one of them is seen.

    Args:
        seconds: by rows, at one count at least.
        is_measured: False if ``seconds`` are but a guess, so that the first observation at each count decides.
        is_rough: whether not all were measured more than once, so that the first observations at a count weigh more.

    """

    def __init__(self, seconds: Mapping[int, float], is_measured: bool = True, is_rough: bool = False) -> None:
        counts = sorted(seconds)
        values = [max(seconds[count], 1e-9) for count in counts]
        values = _least_from(values)  # noise only adds
        slope = values[-1] / counts[-1]
        if len(counts) > 1:
            slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
        far = 64 * counts[-1]
        self._counts = [*counts, far]
        self._measured = [*values, values[-1] + slope * (far - counts[-1])]
        self._overall, self._num_observed = 0.0, 0  # logarithm of the factor
        self._at_count = [0.0] * len(counts)
        self._num_at_count = [0] * len(counts)
        self.is_rough, self._is_measured = is_rough, is_measured
        self._places: dict[int, tuple[int, float]] = {}

    def __call__(self, rows: Iterable[int]) -> list[float]:
        """Return the seconds of a forward at each number of ``rows``, corrected; nothing takes none."""
        overall = self._overall
        at_count = [*self._at_count, self._at_count[-1]]  # beyond the last the same
        corrected = [exp(overall + own) * m for own, m in zip(at_count, self._measured, strict=True)]
        # More rows do not cost less: what says so is noise, and would make useless draft tokens look cheap.
        values = _least_from(corrected)
        return [self._interpolate(values, count) for count in rows]

    @property
    def is_observed(self) -> bool:
        """Whether a step has told anything yet."""
        return self._num_observed > 0

    @property
    def factor(self) -> float:
        """By how much everything takes longer than it was measured to."""
        return exp(self._overall)

    def num_observed(self, rows: int) -> int:
        """Return how many steps of about ``rows`` rows have told something."""
        return self._num_at_count[self._nearest(rows)]

    def measured(self, rows: int) -> float:
        """Return the seconds at ``rows`` before any correction."""
        return self._interpolate(self._measured, rows)

    def _interpolate(self, values: list[float], rows: int) -> float:
        """Return what stands between the ``values`` at the counts around ``rows``, and 0 for no rows."""
        found = self._places.get(rows)
        if found is None:
            found = self._places[rows] = self._place_of(rows)
        below, share = found
        return values[below] + share * (values[below + 1] - values[below]) if rows else 0.0

    def _place_of(self, rows: int) -> tuple[int, float]:
        """Return the number of the last count not above ``rows``, and how far it is from there to the next."""
        counts = self._counts
        below = min(max(bisect_right(counts, rows) - 1, 0), len(counts) - 2)
        share = (rows - counts[below]) / (counts[below + 1] - counts[below])
        return below, min(max(share, 0.0), 1.0)

    def observe(self, rows: int, ratio: float) -> None:
        """Learn that forwards of about ``rows`` rows took ``ratio`` times the measured seconds."""
        if ratio <= 0:
            return
        node = self._nearest(rows)
        surprise = log(ratio) - self._overall - self._at_count[node]
        if not (self._is_measured or self._num_observed):
            self._overall = surprise
        elif not (self._is_measured or self._num_at_count[node]):
            self._at_count[node] = surprise
        else:
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
            self._overall += surprise * max(_OVERALL_RATE, 1 / (self._num_observed + 3))
            num = self._num_at_count[node]
            self._at_count[node] += surprise * max(_COUNT_RATE, 0.7 / (num + 1) if self.is_rough else 0.25 / (num + 2))
        self._num_observed += 1
        self._num_at_count[node] += 1

    def _nearest(self, rows: int) -> int:
        above = bisect_left(self._counts, rows, hi=len(self._at_count) - 1)
        return above - (above > 0 and self._counts[above] - rows > rows - self._counts[above - 1])


def _least_from(values: list[float]) -> list[float]:
    """Return at each place the least of what stands there and after it."""
    return list(accumulate(reversed(values), min))[::-1]


def unknown_cost(most_rows: int) -> CostCurve:
    """Return the cost of what has not been measured: next to nothing, until the first steps tell."""
    return CostCurve(dict.fromkeys(row_counts(most_rows), 1e-6), is_measured=False)


def is_rough(seconds: Mapping[int, float]) -> bool:
    """Return whether the seconds rest on one forward at some counts: there was no time for more."""
    return sum(seconds.values()) > _ENOUGH_SECONDS


def row_counts(largest: int) -> list[int]:
    """Return the row counts to measure: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to ``largest``."""
    doubled = [2**i for i in range(largest.bit_length())]
    return sorted({n for power in doubled for n in (power, power * 3 // 2) if n < largest} | {largest})


class StepCosts(NamedTuple):
    """What is known of a step's cost.

    Attributes:
        verify: of the target's forward, by rows.
        draft: of one drafting forward, by sequences.
        once: of drafting in a step, besides its forwards.
        entry_seconds: of one token that a draft model lacks, where it catches up with many.
        is_asynchronous: on a GPU only a whole step's time means something: it is shared out as expected.
        choice_seconds: of choosing K for a full batch.
        observation_seconds: of learning from a step of a full batch.

    """

    verify: CostCurve
    draft: CostCurve
    once: float = 0.0
    entry_seconds: float = 0.0
    is_asynchronous: bool = False
    choice_seconds: float = 0.0
    observation_seconds: float = 0.0


def measured_costs(profiler: Profiler, most: int) -> StepCosts:
    """Time the forwards of both models, for up to ``most`` draft tokens per sequence."""
    num = profiler.max_batch_size
    measured = profiler.verify_seconds(row_counts(num * (most + 1)))
    verify = CostCurve(measured, is_rough=is_rough(measured))
    drafting = profiler.draft_seconds(row_counts(max(num, _CATCHING_UP)))
    if drafting is None:
        return StepCosts(verify, unknown_cost(num))
    once, largest = drafting.pop(0, 0.0), max(drafting)
    draft = CostCurve(drafting, is_rough=is_rough(drafting))
    return StepCosts(verify, draft, once, drafting[largest] / largest, profiler.is_asynchronous)
