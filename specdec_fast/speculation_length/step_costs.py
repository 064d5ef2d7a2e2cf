"""The seconds of a step: forwards timed when the engine is made, corrected by the steps that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import exp, log

from specdec_fast.speculation_length.base import Profiler

_MOST_PROFILED_ROWS = 2048  # of a forward: more are extrapolated, and their logits may not fit
_CATCH_UP_ROWS = 64  # rows of the draft model's forward from which the cost of prefilling one token is taken
_TREES = 1000  # what the numbers of kinds of steps with trees begin at, far from those of chains
_RATE = 0.3  # weight of the steps of a choice, beside all before


class StepCosts:
    """Seconds of a step of B sequences with K draft tokens each.

    The profile gives ``verify(B (K + 1)) + K draft(B) + once`` from forwards over short contexts. What it lacks (longer
    contexts, two models that alternate in the caches, a drafter that it cannot time) is learned as a factor for each
    kind of step: plain ones, chains of each length and trees of each depth.

    A drafter of trees has further numbers K, those from ``max_draft_tokens + 1`` on: K - ``max_draft_tokens`` is then
    the depth of a tree of ``max_nodes`` nodes. If their nodes have scores, not all are verified; until steps show how
    many, such trees are counted as the chains of their depth.

    Args:
        verify: seconds of the target's forward by rows.
        draft: seconds of drafting one token by sequences, and at 0 those besides; None if unknown.
        max_draft_tokens: see above; None if there are no trees.
        max_nodes: the number of nodes that are verified; 0 if it is not known.
        is_asynchronous: whether forwards are only queued, so that the time of whole steps says nothing of one row.
        scores_chains: whether the drafter has chains alone, and their tokens have scores.

    Attributes:
        catch_up: seconds in which the drafter computes one token that it has not seen, as profiled.

    """

    def __init__(
        self,
        verify: Mapping[int, float],
        draft: Mapping[int, float] | None,
        max_draft_tokens: int | None = None,
        max_nodes: int = 0,
        is_asynchronous: bool = False,
        scores_chains: bool = False,
    ) -> None:
        self._verify = _Curve(verify)
        self._max_draft_tokens, self._max_nodes = max_draft_tokens, max_nodes
        self._is_asynchronous, self._scores_chains = is_asynchronous, scores_chains
        self._draft = _Curve({n: s for n, s in draft.items() if n}) if draft else None
        self._once = draft.get(0, 0.0) if draft else 0.0
        self.catch_up = self._draft(_CATCH_UP_ROWS) / _CATCH_UP_ROWS if self._draft else 0.0
        self._learned: dict[int, tuple[float, float]] = {}  # logarithm of the factor and other seconds, by kind of step
        self._profiled: dict[tuple[int, int, int], float] = {}
        self._verified: dict[int, dict[int, float]] = {}  # nodes of a sequence, by power of two of B and by K

    @classmethod
    def measured(cls, profiler: Profiler, max_draft_tokens: int) -> StepCosts:
        """Time the forwards of both models at every row count that a step can have, roughly."""
        num, max_nodes = profiler.max_batch_size, profiler.max_nodes
        most = min(num * (max(max_draft_tokens, max_nodes) + 1), max(num, _MOST_PROFILED_ROWS))
        verify = profiler.verify_seconds(_row_counts(most))
        draft = profiler.draft_seconds(_row_counts(max(num, _CATCH_UP_ROWS)))
        verified = 0 if profiler.has_scores else max_nodes
        return cls(verify, draft, max_draft_tokens, verified, profiler.is_asynchronous, profiler.scores_chains)

    def profiled(self, size: int, k: int, rows: int | None = None) -> float:
        """Return the seconds of a step of ``size`` sequences as they were timed at first.

        Args:
            size: sequences.
            k: draft tokens of each.
            rows: of the target's forward; None: those of a usual step.

        """
        rows = self.rows(size, k) if rows is None else rows
        seconds = self._profiled.get((size, k, rows))
        if seconds is None:
            seconds = self._verify(rows)
            if k and self._draft:
                seconds += self.depth(k) * self._draft(size) + self._once
            self._profiled[size, k, rows] = seconds
        return seconds

    def depth(self, k: int) -> int:
        """Return the largest number of draft tokens on a path."""
        most = self._max_draft_tokens
        return k if most is None or k <= most else k - most

    def rows(self, size: int, k: int) -> int:
        """Return the rows of the target's forward in a usual step."""
        depth = self.depth(k)
        verified = self._verified.get(size.bit_length(), {})
        if self._scores_chains and k and k not in verified:
            k = min(verified, key=lambda each: abs(each - k), default=1)
        nodes = k if k == depth or self._scores_chains else max(depth, self._max_nodes)
        return size + round(size * verified.get(k, nodes))

    def observe_nodes(self, size: int, k: int, count: float) -> None:
        """Learn how many draft tokens are verified in a step, if they have scores."""
        verified, count = self._verified.setdefault(size.bit_length(), {}), count / size
        before = verified.get(k, count)
        verified[k] = before + _RATE * (count - before)

    def seconds(self, size: int, k: int) -> float:
        """Return the seconds expected now."""
        factor, other = self._learned_of(k)
        return self.profiled(size, k) * exp(factor) + other

    def other(self, k: int) -> float:
        """Return the seconds of a step besides forwards: laying rows out, accepting, committing."""
        return self._learned_of(k)[1]

    def verify_seconds(self, rows: float) -> float:
        """Return the seconds of the target's forward alone, corrected as plain steps were."""
        is_known = self.is_observed(0) and not self._is_asynchronous
        return self._verify(rows) * (exp(self._learned_of(0)[0]) if is_known else 1.0)

    @property
    def is_drafter_profiled(self) -> bool:
        """Whether the drafter could be timed."""
        return self._draft is not None

    def is_observed(self, k: int) -> bool:
        """Return whether steps of that kind were observed."""
        return self._kind(k) in self._learned

    def observe(self, k: int, ratio: float, other: float, is_anew: bool = False) -> None:
        """Learn from steps of one K.

        Args:
            k: draft tokens of each sequence.
            ratio: of the seconds of the forwards to those profiled.
            other: seconds besides forwards.
            is_anew: whether what was learned of steps that draft is out of date.

        """
        kind, found = self._kind(k), log(max(ratio, 1e-6))
        if is_anew:
            self._learned = {each: what for each, what in self._learned.items() if not each}
        if kind not in self._learned:
            self._learned[kind] = found, other
            return
        _, its_other = self._learned[kind]
        surprise = _RATE * (found - self._learned[kind][0])  # what slows one kind down mostly slows all down
        self._learned = {each: (factor + surprise, rest) for each, (factor, rest) in self._learned.items()}
        self._learned[kind] = self._learned[kind][0], its_other + _RATE * (other - its_other)

    def _kind(self, k: int) -> int:
        """Return a number of the kind of step: the depth of plain steps and chains, and more for trees."""
        depth = self.depth(k)
        return depth + _TREES * (k != depth)

    def _learned_of(self, k: int) -> tuple[float, float]:
        """Return what steps of that kind showed; until they were observed, what those of the nearest kind did."""
        kind = self._kind(k)
        return self._learned[min(self._learned, key=lambda each: abs(each - kind))] if self._learned else (0.0, 0.0)


class _Curve:
    """Seconds by rows: linear between the timed counts, with the last slope beyond.

    A disturbance only adds to a measurement, so the counts beside it bound it.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._counts = sorted(seconds)
        values = [max(seconds[self._counts[0]], 1e-9)]
        for fewer, count in pairwise(self._counts):
            values.append(min(seconds[count], values[-1] * count / fewer))  # a row costs no more among more rows
        self._values = list(accumulate(reversed(values), min))[::-1]  # and more rows cost no less

    def __call__(self, rows: float) -> float:
        counts, values = self._counts, self._values
        if len(counts) == 1:
            return values[0] * max(1.0, rows / counts[0])
        i = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
        slope = (values[i] - values[i - 1]) / (counts[i] - counts[i - 1])
        return max(values[0], values[i - 1] + slope * (rows - counts[i - 1]))


def _row_counts(largest: int) -> list[int]:
    """Return the row counts to time: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to ``largest``."""
    doubled = [2**i for i in range(largest.bit_length())]
    return sorted({n for power in doubled for n in (power, power * 3 // 2) if n < largest} | {largest})
