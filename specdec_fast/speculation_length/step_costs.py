"""The seconds of a step: forwards timed when the engine is made, corrected by the steps that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import exp, log

from specdec_fast.speculation_length.base import Profiler

_MOST_PROFILED_ROWS = 2048  # of a forward: more are extrapolated, and their logits may not fit
_CATCH_UP_ROWS = 64  # rows of the draft model's forward from which the cost of prefilling one token is taken
_LARGEST_SURPRISE = 0.4  # of the logarithm of a ratio: more is a disturbance, such as another process
_OWN_RATE = 0.3  # of a surprise that the factor of its K follows,
_SHARED_RATE = 0.2  # and those of the others: a machine that slows down slows all, differences between K are stable
_FORGETTING = 0.005  # share by which other factors approach that of its K: a K timed at a bad moment is tried again


class StepCosts:
    """Seconds of a step of B sequences with K draft tokens each.

    The profile gives ``verify(B (K + 1)) + K draft(B) + once`` from forwards over short contexts. What it lacks (longer
    contexts, two models that alternate in the caches, a drafter that it cannot time) is learned as a factor for each K
    and power of two of B.

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
        self._others: dict[tuple[int, bool], float] = {}  # by power of two of B and whether steps draft
        self._latest_other = 0.0
        self._factors: dict[int, dict[int, float]] = {}  # logarithms, by power of two of B and by K
        self._latest: dict[int, float] = {}  # those of the B observed last
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
        verified[k] = before + _OWN_RATE * (count - before)

    def seconds(self, size: int, k: int) -> float:
        """Return the seconds expected now."""
        return self.profiled(size, k) * exp(self._factor(size, k)) + self.other(size, k)

    def other(self, size: int, k: int) -> float:
        """Return the seconds of a step besides forwards: laying rows out, accepting, committing.

        Steps that draft take longer than plain ones. Until such steps were observed, they count as the others did.
        """
        others, length = self._others, size.bit_length()
        return others.get((length, k > 0), others.get((length, k == 0), self._latest_other))

    def verify_seconds(self, size: int, rows: float) -> float:
        """Return the seconds of the target's forward alone, corrected as plain steps of that size were."""
        is_known = self.is_observed(size, 0) and not self._is_asynchronous
        factor = self._factor(size, 0) if is_known else 0.0
        return self._verify(rows) * exp(factor)

    @property
    def is_drafter_profiled(self) -> bool:
        """Whether the drafter could be timed."""
        return self._draft is not None

    def is_observed(self, size: int, k: int) -> bool:
        """Return whether steps of that K and about that size were observed."""
        return k in self._factors.get(size.bit_length(), ())

    def observe(self, size: int, k: int, ratio: float, other: float) -> None:
        """Learn from steps of one K.

        Args:
            size: sequences.
            k: draft tokens of each.
            ratio: of the seconds of the forwards to those profiled.
            other: seconds besides forwards.

        """
        expected = self._factor(size, k)
        surprise = log(max(ratio, 1e-6)) - expected
        if self._factors and (self._draft or not k or self.is_observed(size, k)):
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
        self._latest = factors = self._factors.setdefault(size.bit_length(), {})
        if k in factors:
            for each in factors:
                factors[each] += surprise * (_OWN_RATE if each == k else _SHARED_RATE)
                if each and k:
                    factors[each] += (factors[k] - factors[each]) * _FORGETTING
        else:
            factors[k] = expected + surprise
        key = size.bit_length(), k > 0
        before = self._others.get(key, other)
        self._others[key] = self._latest_other = before + (other - before) * _OWN_RATE

    def _factor(self, size: int, k: int) -> float:
        """Return the logarithm of the factor of K, or of the nearest K observed at about that size, or at any."""
        factors = self._factors.get(size.bit_length()) or self._latest
        if not factors or k in factors:
            return factors.get(k, 0.0)
        depth, is_tree = self.depth(k), k != self.depth(k)
        own = [each for each in factors if (each != self.depth(each)) == is_tree] or list(factors)
        return factors[min(own, key=lambda each: abs(self.depth(each) - depth))]


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
