"""Operands of row operations: how views, constants and numbers are broadcast to each other."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import Operand
from specdec_fast.program.record.row_views import NotLowerableError, RowView

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Truth values, token ids, positions and places along an axis. They are kept as fp32: whole numbers below 2^24.
WHOLE = (torch.bool, torch.int64, torch.int32)
LARGEST_WHOLE = 1 << 24  # fp32 represents all whole numbers up to it


def kept(constant: Tensor) -> Tensor:
    """Return a tensor that keeps the constant's memory alive, even if the model's own tensor gets other memory."""
    if constant.is_neg():
        raise NotLowerableError("a lazy negative view, whose memory holds its numbers with the other sign")
    return constant.detach()


def sizes_of(value: RowView | Tensor | float, rank: int) -> tuple[int, ...]:
    """Return the sizes of ``rank`` axes, the first of which are 1; a number has no axes of its own."""
    if isinstance(value, float):
        return (1,) * rank
    shape = tuple(value.shape) if isinstance(value, Tensor) else value.sizes
    return (1,) * (rank - len(shape)) + shape


def lengths_of(values: list[RowView | Tensor | float], sizes: list[tuple[int, ...]]) -> list[int]:
    """Return the length of the last axis of each value."""
    lengths: list[int] = []
    for value, size in zip(values, sizes, strict=True):
        lengths.append(lengths[-1] if isinstance(value, float) else size[-1])
    return lengths


def strides_of(value: RowView | Tensor | float, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return strides of ``rank`` axes, the first of which are broadcast to ``shape``."""
    if isinstance(value, float):
        return (0,) * rank
    strides = value.stride() if isinstance(value, Tensor) else value.strides
    sizes = sizes_of(value, rank)
    padded = (0,) * (rank - len(strides)) + tuple(strides)
    if any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=False)):
        raise NotLowerableError(f"shapes {list(sizes)} and {list(shape)} of one row do not broadcast")
    return tuple(0 if size == 1 else stride for size, stride in zip(sizes, padded, strict=True))


def operand_of(value: RowView | Tensor | float, strides: tuple[int, ...], length: int) -> Operand:
    """Return the operand of a row operation; the dtype of a constant must be one of ``FLOATS``."""
    if isinstance(value, RowView):
        return Operand(value.buffer, value.dtype, value.offset, strides, length)
    if isinstance(value, Tensor):
        if value.dtype not in FLOATS:
            raise NotLowerableError(f"a constant of {value.dtype}")
        return Operand(kept(value), value.dtype, 0, strides, length)
    return Operand(float(value), torch.float32, 0, strides, length)
