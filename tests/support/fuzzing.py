"""Settings of the fuzz tests, and what a call may have written to."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from support.op_checks import tensors


def fuzz(examples: int) -> settings:
    """The same calls in every run, so that a red test is red again."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


def memory(args: dict[str, Any]) -> list[Tensor]:
    """All that stands behind the arguments, the gaps and rims of views included."""
    return [torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()) for x in tensors(args)]
