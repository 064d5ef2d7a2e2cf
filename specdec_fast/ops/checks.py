"""Declarative argument checks, shared by the ops' declarations.

An implementation receives bare addresses, so what is checked here is what keeps it inside its buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def expect(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def expect_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check dtype, device and shape; None in ``shape`` matches any size."""
    fits = len(shape) == tensor.dim() and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=False))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}].")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; expected {wanted}.")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}.")
