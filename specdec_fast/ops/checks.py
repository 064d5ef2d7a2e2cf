"""Declarative argument checks, shared by the ops' declarations.

An implementation receives bare addresses, so these checks are what keeps it inside its buffers.
"""

from __future__ import annotations

from itertools import pairwise

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
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
        return  # the case of nearly every call, where microseconds count
    fits = len(shape) == tensor.dim() and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=False))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}].")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; expected {wanted}.")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}.")


def expect_offsets(name: str, offsets: Tensor, num_rows: int, strictly: bool) -> None:
    """Check that ``offsets`` rise from 0 to ``num_rows``; only on the CPU, because on a device it would wait."""
    if offsets.device.type != "cpu":
        return
    bounds = offsets.tolist()
    steps = [b - a for a, b in pairwise(bounds)]
    rises = all(step > 0 if strictly else step >= 0 for step in steps)
    expect(
        len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == num_rows and rises,
        f"{name} is {bounds}; expected offsets that rise from 0 to the {num_rows} rows.",
    )


def expect_maximum(name: str, maximum: int, values: Tensor) -> None:
    """Check that no value is above ``maximum``; only on the CPU, for the same reason."""
    if values.device.type == "cpu" and values.numel():
        largest = int(values.max())
        expect(largest <= maximum, f"{name} is {maximum}; the largest is {largest}.")
