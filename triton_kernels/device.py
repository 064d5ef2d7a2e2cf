"""What the launchers ask about the device that kernels are launched on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def properties() -> Any | None:
    """Return the properties of the current NVIDIA device, as ``torch.cuda`` names them; None if there is none.

    Every launch asks for them, so they are kept.
    """
    return _properties(torch.cuda.current_device()) if _has_device() else None


@cache
def _has_device() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


@cache
def _properties(device: int) -> Any:
    return torch.cuda.get_device_properties(device)
