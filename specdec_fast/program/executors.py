"""Which executor runs a model's forward program: the one place that names an executor for a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial

from specdec_fast.ops import Ops
from specdec_fast.ops.registry import BACKENDS
from specdec_fast.program.ir import Append, Attend, ForwardProgram, GroupedLinear, Linear, Plan
from specdec_fast.program.row_views import NotLowerableError

Executor = Callable[[Plan], ForwardProgram]

# By the backend whose ops it computes: ``"module:class"``, so that nothing is imported before it is chosen.
EXECUTORS = {"cpp": "specdec_fast.program.cpp_executor:Program"}

# The ops whose work an executor does itself: in every program, and by instruction.
_IN_EVERY_PROGRAM = ("append_kv_", "paged_attention", "verify_chain")
_OF_INSTRUCTION = {Append: "append_kv_", Attend: "paged_attention", Linear: "linear", GroupedLinear: "grouped_linear"}


def executor_for(ops: Ops) -> tuple[Executor | None, str | None]:
    """Return what builds a model's forward from a ``Plan``, and None; or None and the reason why there is none.

    An executor replaces ops, so their backend must be its own, or a program would have other bits than the ops that
    were asked for. Ops that a plan does not use may come from any backend, or from none.

    Returns:
        A function of a ``Plan``. It raises a NotLowerableError if another backend serves an op that the plan uses.

    """
    for backend, path in EXECUTORS.items():
        if not _served_elsewhere(ops, backend, _IN_EVERY_PROGRAM):
            return partial(_build, ops, backend, path), None
    return None, _why_none(ops)


def _build(ops: Ops, backend: str, path: str, plan: Plan) -> ForwardProgram:
    used = {_OF_INSTRUCTION[type(step)] for step in plan.instructions if type(step) in _OF_INSTRUCTION}
    if elsewhere := _served_elsewhere(ops, backend, used):
        raise NotLowerableError(f"programs run on {backend}, here {elsewhere}")
    module, name = path.split(":")
    program: ForwardProgram = getattr(importlib.import_module(module), name)(plan)
    return program


def _served_elsewhere(ops: Ops, backend: str, used: Iterable[str]) -> str:
    """Say which of the ops in use another backend serves, or none does; empty if ``backend`` serves all of them."""
    elsewhere: dict[str, list[str]] = {}
    for op in sorted(used):
        if (other := ops.chosen.get(op, "no backend")) != backend:
            elsewhere.setdefault(other, []).append(op)
    return "; ".join(f"{other} serves {', '.join(names)}" for other, names in elsewhere.items())


def _why_none(ops: Ops) -> str:
    served = [(backend, _served_elsewhere(ops, backend, _IN_EVERY_PROGRAM)) for backend in EXECUTORS]
    problems = [problem for backend in EXECUTORS if (problem := BACKENDS[backend].why_unavailable())]
    return "; ".join([*(f"programs run on {backend}, here {elsewhere}" for backend, elsewhere in served), *problems])
