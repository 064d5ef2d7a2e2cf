"""Declarative argument checks, shared by the ops' declarations.

An implementation receives bare addresses, so these checks are what keeps it inside its buffers.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stored(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its numbers: itself, or a copy if it is a lazy negative view.

    Ops and programs read memory at bare addresses. That of a view such as ``z.conj().imag`` holds the other sign.
    """
    return tensor.resolve_neg() if tensor.is_neg() else tensor  # not always: a recording sees the operation


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are at its address; if there are none, the answer means nothing."""
    if tensor.is_neg():
        return False
    return tensor.data_ptr() > tensor.storage_offset() * tensor.itemsize  # equal: its storage is at the address 0


def expect(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def expect_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check dtype, device and shape, and that its memory holds its numbers; None in ``shape`` matches any size."""
    if is_in_memory(tensor) and tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
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
    if tensor.is_neg():  # such as z.conj().imag
        raise ValueError(
            f"{name} is a lazy negative view: its memory holds its numbers with the other sign; pass its resolve_neg()."
        )
    if tensor.numel() > 0 and not is_in_memory(tensor):
        raise ValueError(
            f"{name}, a {type(tensor).__name__} on {tensor.device}, has no memory; expected a tensor of numbers, not "
            "one for tracing or on the meta device."
        )


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
