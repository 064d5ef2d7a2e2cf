"""Who runs forward programs: the one place that names an executor for a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from specdec_fast.ops import Ops
from specdec_fast.ops.registry import BACKENDS
from specdec_fast.program.ir import ForwardProgram, Plan

Executor = Callable[[Plan], ForwardProgram]

# By the backend that serves every op: ``"module:class"``, so that nothing is imported before it is chosen.
EXECUTORS = {"cpp": "specdec_fast.program.cpp_executor:Program"}


def executor_for(ops: Ops) -> tuple[Executor | None, str | None]:
    """Return what builds a model's forward from a ``Plan``, and None; or None and the reason why there is none."""
    backends = set(ops.chosen.values())
    path = EXECUTORS.get(next(iter(backends))) if len(backends) == 1 else None
    if path is None:
        return None, _why_none(backends)
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name), None


def _why_none(backends: set[str]) -> str:
    needed = ", ".join(EXECUTORS)
    problems = [problem for name in EXECUTORS if (problem := BACKENDS[name].why_unavailable())]
    return f"programs need every op from {needed}, here {', '.join(sorted(backends))} serve them" + "".join(
        f"; {problem}" for problem in problems
    )
