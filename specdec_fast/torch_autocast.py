"""A caller's ``torch.autocast``, in which an engine does not compute: its results have the dtypes of its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_DEVICES = ("cpu", "cuda")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function compute in the dtypes of its tensors, also inside of the caller's ``torch.autocast``.

    Autocast belongs to a thread. So without this, a request would have other bits in the thread of one caller than in
    that of another, which may run its step.
    """

    @wraps(function)
    def computed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        present = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        for device in present:
            torch.set_autocast_enabled(device, False)
        try:
            return function(*args, **kwargs)
        finally:
            for device in present:
                torch.set_autocast_enabled(device, True)

    return computed
