"""The mechanisms of ``num_draft_tokens="auto"``, each with what takes it out: other constants, or other methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from statistics import fmean
from typing import Any
from unittest.mock import patch

from specdec_fast.speculation_length import acceptance, adaptive, step_costs, verify_budget
from specdec_fast.speculation_length.acceptance import Acceptance
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.step_costs import StepCosts
from specdec_fast.speculation_length.verify_budget import HitRates

_limits, _observe, _choose, _end_probe = (
    AdaptiveLength.limits, AdaptiveLength.observe, AdaptiveLength._choose, AdaptiveLength._end_probe
)  # fmt: skip
_expected = Acceptance.expected_tokens


def _raw_curve(self: Any, seconds: Any) -> None:
    self._counts = sorted(seconds)
    self._values = [max(seconds[count], 1e-9) for count in self._counts]


def _counting_catch_up(self: Any, batch: Any) -> Any:
    limits = _limits(self, batch)
    self._is_catching_up = False
    return limits


def _without_other(self: Any, step: Any) -> None:
    self._is_asynchronous = True
    _observe(self, step)


def _probing_one(self: Any, batch: Any) -> None:
    self._probe_k = 1
    _choose(self, batch)


def _weighing_alike(self: Any) -> None:
    with patch.object(self._of_chains, "expected_tokens", lambda: range(self.max_draft_tokens + 1)):
        _end_probe(self)


def _holding(steps: int) -> Any:
    def choose(self: Any, batch: Any) -> None:
        _choose(self, batch)
        if self._k and self._steps_left > 1 and not (self._is_probing or self._is_trying):
            self._steps_left = steps

    return choose


def _keeping_size(self: Any, batch: Any) -> Any:
    if self._steps_left > 0:
        self._size = len(batch)
    return _limits(self, batch)


def _as_asked(self: Any) -> Any:
    self._asked = list(self._proposed)
    return _expected(self)


def _all_rows(self: Any, size: int, k: int) -> int:
    depth = self.depth(k)
    return size * (1 + (k if k == depth else max(depth, self._max_nodes)))


def _unsorted(self: Any) -> None:
    self._rates = [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]


PARTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "profile bounded by its neighbours": ((step_costs._Curve, "__init__", _raw_curve),),
    "factors that steps correct": ((StepCosts, "observe", lambda self, *_: None),),
    "factors of plain steps, chains and trees": ((StepCosts, "_kind", lambda self, k: 0),),
    "factors by depth": ((StepCosts, "_kind", lambda self, k: (k > 0) + step_costs._TREES * (k != self.depth(k))),),
    "other seconds apart from forwards": ((AdaptiveLength, "observe", _without_other),),
    "low median of a round": ((adaptive, "median_low", fmean),),
    "no times of steps that catch up": ((AdaptiveLength, "limits", _counting_catch_up),),
    "cost of the drafter's prefill": ((AdaptiveLength, "_prefill_seconds", lambda self, batch: 0.0),),
    "optimistic prior": ((acceptance, "_PRIOR", 0.5),),
    "window of acceptance": ((acceptance, "_WINDOW", 1e12),),
    "least share of the past that is kept": ((acceptance, "_LEAST_KEPT", 0.0),),
    "change detector": ((acceptance, "_CHANGE", inf),),
    "acceptance shrunk to its neighbour": ((acceptance, "_NEIGHBOUR_TOKENS", 1e-6),),
    "acceptance by position": ((acceptance, "_NEIGHBOUR_TOKENS", 1e9),),
    "share that is proposed": ((Acceptance, "expected_tokens", _as_asked),),
    "its shrinking to the neighbour": ((acceptance, "_NEIGHBOUR_ASKED", 1e-9),),
    "first drafts for few sequences": ((adaptive, "_KNOWN", 0),),
    "short rounds of large batches": ((AdaptiveLength, "_choose", _holding(32)),),
    "long rounds of small batches": ((AdaptiveLength, "_choose", _holding(4)),),
    "choice when the batch size changes": ((AdaptiveLength, "limits", _keeping_size),),
    "threshold of 2%": ((adaptive, "_LEAST_GAIN", 1.0), (adaptive, "_LEAST_KEPT_GAIN", 1.0)),
    "no probe where nothing would pay": ((AdaptiveLength, "_may_probe", lambda self, *_: self._probe_budget >= 0),),
    "probes": ((AdaptiveLength, "_may_probe", lambda self, *_: False),),
    "weight of a probe": ((adaptive, "_PROBE_KEEPS", 1.0),),
    "the same by its probability": ((AdaptiveLength, "_end_probe", _weighing_alike),),
    "probes of three tokens": ((AdaptiveLength, "_choose", _probing_one),),
    "trials": ((AdaptiveLength, "_may_try", lambda self, *_: False),),
    "plain steps among drafting ones": ((adaptive, "_PLAIN_EVERY", inf), (StepCosts, "is_observed", lambda *_: True)),
    "plain steps after the first time": ((adaptive, "_PLAIN_EVERY", inf),),
    "budget of rows": ((AdaptiveLength, "least_score", lambda self, scores: -inf),),
    "hit rates": ((HitRates, "update", lambda self: None),),
    "their prior": ((verify_budget, "_PRIOR_NODES", 1e-3),),
    "their order": ((HitRates, "update", _unsorted),),
    "nodes that are usually verified": ((StepCosts, "rows", _all_rows),),
    "rows corrected as plain steps": ((StepCosts, "verify_seconds", lambda self, rows: self._verify(rows)),),
}
OF_SCORES = tuple(PARTS)[-6:]  # these matter only to drafters that score their tokens


@contextmanager
def without(part: str | None) -> Iterator[None]:
    """Take a mechanism out of the policy; none if it is None."""
    with ExitStack() as stack:
        for target, name, value in PARTS[part] if part else ():
            stack.enter_context(patch.object(target, name, value))
        yield
