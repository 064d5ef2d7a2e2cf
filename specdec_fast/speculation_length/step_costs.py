"""The seconds of a step, from forwards that are timed when the engine is made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

from specdec_fast.speculation_length.base import Profiler

_MOST_PROFILED_ROWS = 2048  # of a forward: more are extrapolated, and their logits may not fit
_CATCH_UP_ROWS = 64  # rows of the draft model's forward from which the cost of prefilling one token is taken


class StepCosts:
    """Seconds of a step of B sequences with K draft tokens each: ``verify(B (K + 1)) + K draft(B) + once``.

    A drafter of trees has further numbers K, those from ``max_draft_tokens + 1`` on: K - ``max_draft_tokens`` is then
    the depth of a tree of ``max_nodes`` nodes. If their nodes have scores, not all are verified, and such trees are
    counted as the chains of their depth.

    Args:
        verify: seconds of the target's forward by rows.
        draft: seconds of drafting one token by sequences, and at 0 those besides; None if unknown, which counts as 0.
        max_draft_tokens: the largest K of a chain.
        max_nodes: the largest number of nodes of a tree; 0 if there are no trees.
        has_scores: whether the nodes of these trees have scores.

    Attributes:
        verify: seconds of the target's forward, as a function of its rows.
        lengths: all K.
        catch_up: seconds in which the drafter computes one token that it has not seen.
    """

    def __init__(
        self,
        verify: Mapping[int, float],
        draft: Mapping[int, float] | None,
        max_draft_tokens: int = 8,
        max_nodes: int = 0,
        has_scores: bool = False,
    ) -> None:
        self.verify = _Curve(verify)
        has_trees = max_nodes > max_draft_tokens
        self.lengths = range(max_draft_tokens * (2 if has_trees else 1) + 1)
        self._max_draft_tokens = max_draft_tokens
        self._max_nodes = 0 if has_scores else max_nodes
        draft = draft or {}
        forwards = {n: s for n, s in draft.items() if n}
        self._draft = _Curve(forwards) if forwards else lambda num_sequences: 0.0
        self._once = min(1e6, max(0.0, draft.get(0, 0.0)))
        self.catch_up = self._draft(_CATCH_UP_ROWS) / _CATCH_UP_ROWS

    @classmethod
    def measured(cls, profiler: Profiler, max_draft_tokens: int) -> StepCosts:
        """Time the forwards of both models at every row count that a step can have, roughly."""
        num = profiler.max_batch_size
        max_nodes = profiler.max_nodes
        most = min(num * (max(max_draft_tokens, max_nodes) + 1), max(num, _MOST_PROFILED_ROWS))
        verify = profiler.verify_seconds(_row_counts(most))
        draft = profiler.draft_seconds(_row_counts(max(num, _CATCH_UP_ROWS)))
        return cls(verify, draft, max_draft_tokens, max_nodes, profiler.has_scores)

    def profile(self, size: int) -> list[float]:
        """Return the seconds of a step of ``size`` sequences, by K."""
        draft = self._draft(size)
        drafting = [self.depth(k) * draft + self._once if k else 0.0 for k in self.lengths]
        return [self.verify(self.rows(size, k)) + drafting[k] for k in self.lengths]

    def depth(self, k: int) -> int:
        """Return the largest number of draft tokens on a path."""
        return k - self._max_draft_tokens if k > self._max_draft_tokens else k

    def rows(self, size: int, k: int) -> int:
        """Return the rows of the target's forward."""
        depth = self.depth(k)
        return size * (1 + (k if k == depth else max(depth, self._max_nodes)))


class _Curve:
    """Seconds by rows: linear between the timed counts, with the last slope beyond.

    A disturbance only adds to a measurement, so the counts beside it bound it.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._counts = sorted(seconds)
        known = {count: min(1e6, max(1e-9, each)) for count, each in seconds.items()}  # 1e-9 in place of NaN
        values = [known[self._counts[0]]]
        for fewer, count in pairwise(self._counts):
            values.append(min(known[count], values[-1] * count / fewer))  # a row costs no more among more rows
        self._values = list(accumulate(reversed(values), min))[::-1]  # and more rows cost no less

    def __call__(self, rows: float) -> float:
        counts = self._counts
        values = self._values
        if len(counts) == 1:
            return values[0] * max(1.0, rows / counts[0])
        i = min(max(bisect_right(counts, rows), 1), len(counts) - 1)
        slope = (values[i] - values[i - 1]) / (counts[i] - counts[i - 1])
        return max(values[0], values[i - 1] + slope * (rows - counts[i - 1]))


def _row_counts(largest: int) -> list[int]:
    """Return the row counts to time: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to ``largest``."""
    doubled = [2**i for i in range(largest.bit_length())]
    return sorted({n for power in doubled for n in (power, power * 3 // 2) if n < largest} | {largest})
