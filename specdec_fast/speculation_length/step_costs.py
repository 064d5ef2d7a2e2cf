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
_OWN_RATE = 0.3  # of a surprise that a factor follows,
_SHARED_RATE = 0.2  # and that the others do: a machine that slows down slows all, differences between them are stable
# Share by which factors of other K approach that of one, if the profile has the drafter: a K timed at a bad moment is
# tried again.
_FORGETTING = 0.1


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
        max_draft_tokens: the largest K of a chain.
        max_nodes: the largest number of nodes of a tree; 0 if there are no trees.
        has_scores: whether the nodes of these trees, or the tokens of these chains, have scores.
        is_asynchronous: whether forwards are only queued, so that the time of whole steps says nothing of one row.

    Attributes:
        catch_up: seconds in which the drafter computes one token that it has not seen, as profiled.
    """

    def __init__(
        self,
        verify: Mapping[int, float],
        draft: Mapping[int, float] | None,
        max_draft_tokens: int = 8,
        max_nodes: int = 0,
        has_scores: bool = False,
        is_asynchronous: bool = False,
    ) -> None:
        self._verify = _Curve(verify)
        self._has_trees = max_nodes > max_draft_tokens
        self._scores_chains = has_scores and not max_nodes
        self._max_draft_tokens = max_draft_tokens
        self._max_nodes = 0 if has_scores else max_nodes
        self._lengths = range(max_draft_tokens * (2 if self._has_trees else 1) + 1)
        self._is_asynchronous = is_asynchronous
        self._draft = _Curve({n: s for n, s in draft.items() if n}) if draft else None
        self._once = draft.get(0, 0.0) if draft else 0.0
        self.catch_up = self._draft(_CATCH_UP_ROWS) / _CATCH_UP_ROWS if self._draft else 0.0
        self._others: dict[tuple[int, bool], float] = {}  # by power of two of B and whether steps draft
        self._latest_other = 0.0
        self._kinds = [0] + [1 if self.depth(k) == k else 2 for k in self._lengths[1:]]  # plain, chain, tree
        self._factors: dict[int, list[float]] = {}  # logarithms, by power of two of B and by K
        self._latest = [0.0] * len(self._lengths)  # those of the B observed last
        self._observed: set[tuple[int, int]] = set()  # powers of two of B, and K
        self._profiles: dict[int, list[float]] = {}
        self._verified: dict[int, dict[int, float]] = {}  # nodes of a sequence, by power of two of B and by K

    @classmethod
    def measured(cls, profiler: Profiler, max_draft_tokens: int) -> StepCosts:
        """Time the forwards of both models at every row count that a step can have, roughly."""
        num = profiler.max_batch_size
        max_nodes = profiler.max_nodes
        most = min(num * (max(max_draft_tokens, max_nodes) + 1), max(num, _MOST_PROFILED_ROWS))
        verify = profiler.verify_seconds(_row_counts(most))
        draft = profiler.draft_seconds(_row_counts(max(num, _CATCH_UP_ROWS)))
        return cls(verify, draft, max_draft_tokens, max_nodes, profiler.has_scores, profiler.is_asynchronous)

    def profile(self, size: int) -> list[float]:
        """Return the seconds of a step of ``size`` sequences as they were timed at first, by K."""
        seconds = self._profiles.get(size)
        if seconds is None:
            seconds = self._profiles[size] = [self.profiled(size, k, self.rows(size, k)) for k in self._lengths]
        return seconds

    def profiled(self, size: int, k: int, rows: int) -> float:
        """Return ``profile(size)[k]``, but for a forward of the target of ``rows``."""
        seconds = self._verify(rows)
        return seconds + self.depth(k) * self._draft(size) + self._once if k and self._draft else seconds

    def depth(self, k: int) -> int:
        """Return the largest number of draft tokens on a path."""
        most = self._max_draft_tokens
        return k - most if self._has_trees and k > most else k

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
        verified = self._verified.setdefault(size.bit_length(), {})
        count = count / size
        before = verified.get(k, count)
        verified[k] = before + _OWN_RATE * (count - before)
        self._profiles.clear()

    def seconds(self, size: int) -> list[float]:
        """Return the seconds expected now, by K."""
        plain = self.other(size, 0)
        drafting = self.other(size, 1)
        factors = self._factors.get(size.bit_length(), self._latest)
        seconds = [each * exp(factor) + drafting for each, factor in zip(self.profile(size), factors, strict=True)]
        seconds[0] += plain - drafting
        return seconds

    def other(self, size: int, k: int) -> float:
        """Return the seconds of a step besides forwards: laying rows out, accepting, committing.

        Steps that draft take longer than plain ones. Until such steps were observed, they count as the others did.
        """
        others = self._others
        length = size.bit_length()
        return others.get((length, k > 0), others.get((length, k == 0), self._latest_other))

    def verify_seconds(self, size: int, rows: float) -> float:
        """Return the seconds of the target's forward alone, corrected as plain steps of that size were."""
        is_known = self.is_observed(size, 0) and not self._is_asynchronous
        return self._verify(rows) * (exp(self._factors[size.bit_length()][0]) if is_known else 1.0)

    @property
    def is_drafter_profiled(self) -> bool:
        """Whether the drafter could be timed."""
        return self._draft is not None

    def is_observed(self, size: int, k: int) -> bool:
        """Return whether steps of that K and about that size were observed."""
        return (size.bit_length(), k) in self._observed

    def observe(self, size: int, k: int, ratio: float, other: float) -> None:
        """Learn from steps of ``size`` sequences with K draft tokens each.

        ``ratio`` is that of the forwards' seconds to those profiled; ``other`` are the seconds besides forwards.
        """
        length = size.bit_length()
        kinds = self._kinds
        observed = self._observed
        is_new = not self.is_observed(size, k)
        self._latest = factors = self._factors.setdefault(length, list(self._latest))
        is_drafter_unknown = k > 0 and not self._draft
        surprise = log(max(ratio, 1e-6)) - factors[k]
        if not is_new or (observed and not is_drafter_unknown):
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
        own = surprise * (1.0 if is_new else _OWN_RATE)
        shared = 0.0 if is_new and is_drafter_unknown else surprise * _SHARED_RATE
        for j in self._lengths:
            if j == k or not (observed or is_drafter_unknown):
                factors[j] += own
            elif kinds[j] == kinds[k] and (length, j) not in observed:
                factors[j] += own * self.depth(j) / self.depth(k) if is_drafter_unknown else own
            else:
                factors[j] += shared
                if j and k and self._draft:
                    factors[j] += (factors[k] - factors[j]) * _FORGETTING
        observed.add((length, k))
        before = self._others.get((length, k > 0), other)
        self._others[length, k > 0] = self._latest_other = before + (other - before) * _OWN_RATE


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
