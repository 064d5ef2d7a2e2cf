"""Engines of one model share its recorded program: recording takes two thirds of the time of making an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.model_watch import Watch
from specdec_fast.program import compile_forward


@contextmanager
def recorded_once() -> Iterator[None]:
    """In the ``with`` block engines record a model once, unless it has changed or has to be recorded in another way."""
    recordings: dict[Any, Any] = {}

    def recorded(model, forward, layout, ops, rules, tapped=None, max_positions=None, cache_class=PagedCache):
        taps = None if tapped is None else tapped.__self__.ids
        settings = (layout, sorted(ops.chosen.items()), rules, taps, max_positions, cache_class, model.config)
        key = (id(model), repr(settings))
        watch, plan, _ = recordings.get(key, (None, None, None))
        if watch is None or watch.change() is not None:
            plan = compile_forward(model, forward, layout, ops, rules, tapped, max_positions, cache_class)
            recordings[key] = (Watch(model, plan.baked), plan, model)  # the model is kept, and with it its id
        return plan

    with patch("specdec_fast.runner.ragged_model.compile_forward", recorded):
        yield
