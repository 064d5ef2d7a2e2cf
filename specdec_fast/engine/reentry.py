"""Refuses calls of an engine's core by code that the core itself is calling."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from specdec_fast.errors import EngineBusyError

if TYPE_CHECKING:
    from specdec_fast.engine.core import EngineCore

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outermost(
    method: Callable[Concatenate[EngineCore, _P], _R],
) -> Callable[Concatenate[EngineCore, _P], _R]:
    """Let a method of the core raise an EngineBusyError if a drafter, a policy, a scheduler or a hook calls it.

    Such a call would change the sequences that the core is working on.
    """

    @wraps(method)
    def guarded(core: EngineCore, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if core.is_called:
            raise EngineBusyError(
                f"core.{method.__name__} was called by code that the engine's core was calling: a drafter, a policy "
                "for K, a scheduler or a hook may not call the engine; call it when the step has ended."
            )
        core.is_called = True
        try:
            return method(core, *args, **kwargs)
        finally:
            core.is_called = False

    return guarded
