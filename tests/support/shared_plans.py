"""Records a model's forward once for all engines over it, each of which would record the same for 40 ms."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from specdec_fast.model_watch import Watch
from specdec_fast.models import ragged_model
from specdec_fast.program import compile_forward

_plans: WeakKeyDictionary[Any, dict[Any, tuple[Any, Watch]]] = WeakKeyDictionary()


def share_plans() -> None:
    """Let engines take what was recorded for an earlier one, if the model is what it was."""
    ragged_model.compile_forward = _recorded_once


def _recorded_once(model, forward, layout, ops, sliding, tapped=None, max_positions=None):
    plans = _plans.setdefault(model, {})
    taps = None if tapped is None else tapped.__self__.ids
    key = (layout, tuple(ops.chosen.items()), sliding, taps, max_positions, model.config.to_json_string())
    if key not in plans or plans[key][1].change() is not None:
        plan = compile_forward(model, forward, layout, ops, sliding, tapped, max_positions)
        plans[key] = (plan, Watch(model, plan.baked))
    return plans[key][0]
