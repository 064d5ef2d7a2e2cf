"""Settings of the fuzz tests, and the memory that a call could write to."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from support.op_checks import tensors


def fuzz(examples: int) -> settings:
    """Return settings with so many examples; they are the same in every run (``conftest.py``)."""
    return settings(max_examples=examples)


def memory(args: dict[str, Any]) -> list[Tensor]:
    """Return the whole memory behind the arguments, the gaps and rims of views included."""
    return [torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()) for x in tensors(args)]
