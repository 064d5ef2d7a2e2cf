"""Engines share what is found out about a model when one is made, which takes two thirds of making one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage

from bench.op_cases import with_tensors
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.model_watch import hooked_class, replaced_forward
from specdec_fast.models import sharded
from specdec_fast.models.model_checks import check_ignores_answers
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import Plan
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.ragged_model import RaggedModel


@dataclass(frozen=True)
class _Recording:
    plan: Plan
    places: tuple[Any, ...]
    storages: list[int]
    baked: list[Tensor]  # numbers that the plan has copied, as they were then
    kept: Any  # the model, and with it the addresses of its weights


# By the kind of a model and how it is recorded.
_RECORDINGS: dict[Any, _Recording] = {}


@contextmanager
def recorded_once() -> Iterator[None]:
    """In the ``with`` block engines record one model of a kind; the plans of others are made of that recording."""

    def recorded(model, forward, layout, ops, rules, tapped=None, max_positions=None, cache_class=PagedCache):
        taps = None if tapped is None else tapped.__self__.ids
        kind = _kind_of(model, layout, sorted(ops.chosen.items()), rules, taps, max_positions, cache_class)
        known = None if kind is None else _RECORDINGS.get(kind)
        places, storages = _places_of(model)
        if known is not None and known.places == places:
            plan = _moved(known, storages)
            if len(plan.baked) == len(known.baked) and all(map(torch.equal, plan.baked, known.baked)):
                return plan
        plan = compile_forward(model, forward, layout, ops, rules, tapped, max_positions, cache_class)
        if kind is not None:
            addresses = [storage.data_ptr() for storage in storages]
            _RECORDINGS[kind] = _Recording(plan, places, addresses, [each.clone() for each in plan.baked], model)
        return plan

    with patch("specdec_fast.runner.ragged_model.compile_forward", recorded):
        yield


def _places_of(model: torch.nn.Module) -> tuple[tuple[Any, ...], list[UntypedStorage]]:
    """Return how the tensors of a model lie in their storages, and which of them share one; and the storages."""
    places: list[Any] = []
    storages: dict[int, UntypedStorage] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        number = list(storages).index(storage.data_ptr())
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_neg())
        places.append((name, number, storage.nbytes(), *layout))
    return tuple(places), list(storages.values())


def _moved(known: _Recording, storages: list[UntypedStorage]) -> Plan:
    """Return the plan with the weights of another model in the places of those of the recorded one."""
    others = dict(zip(known.storages, storages, strict=True))

    def moved(path: str, tensor: Tensor) -> Tensor:
        other = others.get(tensor.untyped_storage().data_ptr())
        if other is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())

    instructions = with_tensors(known.plan.instructions, moved)
    return replace(known.plan, instructions=instructions, baked=with_tensors(known.plan.baked, moved))


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

    engine = patch("specdec_fast.runner.loading.make_deterministic", deterministic)
    drafter = patch("specdec_fast.drafters.registry.make_deterministic", deterministic)
    with engine, drafter, patch("specdec_fast.models.model_checks.check_ignores_answers", ignores_answers):
        yield


def _kind_of(model: Any, *others: Any) -> Any:
    """Return what decides how a model computes; None if hooks, other forwards or other processes may decide it."""
    if any(type(module).__module__ == sharded.__name__ for module in model.modules()):
        return None
    if hooked_class(model) or any(replaced_forward(module) for module in model.modules()):
        return None
    dtypes = {str(tensor.dtype) for tensor in chain(model.parameters(), model.buffers())}
    config = json.dumps(model.config.to_dict(), default=str, sort_keys=True)
    return tuple(map(type, model.modules())), str(model), model.training, repr((sorted(dtypes), config, others))
