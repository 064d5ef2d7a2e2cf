"""Engines share what is found out about a model when one is made, which takes two thirds of making one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.model_watch import Watch, hooked_class, replaced_forward
from specdec_fast.models.model_checks import check_ignores_answers
from specdec_fast.program import compile_forward
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.ragged_model import RaggedModel


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


# By the kind of a model, its row padding, why its rows are computed one by one, and whether all linears are replaced.
_PADDINGS: dict[Any, Any] = {}
# Kinds of models whose logits do not depend on what their cache answers.
_IGNORE_ANSWERS: set[Any] = set()


@contextmanager
def checked_once() -> Iterator[None]:
    """In the ``with`` block engines check one model of a kind, whatever numbers its weights have."""

    def deterministic(model: RaggedModel) -> None:
        kind = _kind_of(model.model, model.ops.chosen, model.page_size, model.has_program)
        found = None if kind is None else _PADDINGS.get(kind)
        if found is not None:
            model.row_padding, model.why_one_by_one, model.hf.linears.sees_all = found
            return
        had_program = model.has_program
        make_deterministic(model)
        if kind and model.has_program == had_program:
            _PADDINGS[kind] = (model.row_padding, model.why_one_by_one, model.hf.linears.sees_all)

    def ignores_answers(name: str, forward: Callable[..., Any], layout: Any, make_cache: Any, page_size: int) -> None:
        kind = _kind_of(forward.__self__.model, {}, page_size, layout)
        if kind is None or kind not in _IGNORE_ANSWERS:
            check_ignores_answers(name, forward, layout, make_cache, page_size)
            _IGNORE_ANSWERS.add(kind)

    engine = patch("specdec_fast.engine.engine.make_deterministic", deterministic)
    drafter = patch("specdec_fast.drafters.registry.make_deterministic", deterministic)
    with engine, drafter, patch("specdec_fast.models.model_checks.check_ignores_answers", ignores_answers):
        yield


def _kind_of(model: Any, *others: Any) -> Any:
    """Return what decides how a model computes; None if hooks or other forwards may decide it."""
    if hooked_class(model) or any(replaced_forward(module) for module in model.modules()):
        return None
    dtypes = {str(tensor.dtype) for tensor in chain(model.parameters(), model.buffers())}
    config = json.dumps(model.config.to_dict(), default=str, sort_keys=True)
    return tuple(map(type, model.modules())), str(model), model.training, repr((sorted(dtypes), config, others))
