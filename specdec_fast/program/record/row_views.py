"""Views of a row: what PyTorch's views of a ``[1, T, ...]`` tensor mean for one of its ``T`` rows.

One axis of a tensor of a forward counts the rows, wherever transposes have moved it. The other axes belong to the row.
A view that does not mix rows is the same view of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch


class NotLowerableError(Exception):
    """The model does something that a forward program cannot express; the message says what."""


@dataclass(frozen=True)
class RowView:
    """The places of a tensor's numbers in a buffer's row."""

    buffer: int  # index of the buffer
    domain: int  # which rows the buffer has
    axis: int  # the axis of the tensor that counts the rows
    sizes: tuple[int, ...]  # sizes of all axes, with 1 at axis
    strides: tuple[int, ...]  # strides of all axes in numbers, with 0 at axis
    offset: int  # offset of the first number from the beginning of the row
    dtype: torch.dtype  # type of the numbers

    @property
    def size(self) -> int:
        """Numbers per row."""
        return prod(self.sizes)

    @property
    def is_dense(self) -> bool:
        """Whether a row's numbers are contiguous in their order."""
        return all(s == 1 or a == b for s, a, b in zip(self.sizes, self.strides, dense(self.sizes), strict=True))

    def permuted(self, order: Sequence[int]) -> RowView:
        """Return ``tensor.permute(order)``."""
        order = [d % len(self.sizes) for d in order]
        sizes, strides = (tuple(values[d] for d in order) for values in (self.sizes, self.strides))
        return replace(self, axis=order.index(self.axis), sizes=sizes, strides=strides)

    def narrowed(self, axis: int, start: int, size: int, step: int = 1) -> RowView:
        """Return ``size`` numbers of an axis, every ``step``-th from ``start`` on."""
        axis %= len(self.sizes)
        sizes = list(self.sizes)
        strides = list(self.strides)
        sizes[axis] = size
        strides[axis] = strides[axis] * step
        offset = self.offset + start * self.strides[axis]
        return replace(self, sizes=tuple(sizes), strides=tuple(strides), offset=offset)

    def without(self, axis: int, index: int) -> RowView:
        """Return ``tensor.select(axis, index)``."""
        axis %= len(self.sizes)
        kept = [d for d in range(len(self.sizes)) if d != axis]
        sizes, strides = (tuple(values[d] for d in kept) for values in (self.sizes, self.strides))
        offset = self.offset + index % self.sizes[axis] * self.strides[axis]
        return replace(self, axis=kept.index(self.axis), sizes=sizes, strides=strides, offset=offset)

    def expanded(self, axis: int, sizes: tuple[int, ...]) -> RowView:
        """Return ``tensor.expand(...)``; ``sizes`` as in a view, with the rows at ``axis``."""
        added = len(sizes) - len(self.sizes)
        if axis - added != self.axis:
            raise NotLowerableError("an expand moves the rows")
        old_sizes = (1,) * added + self.sizes
        old_strides = (0,) * added + self.strides
        strides = tuple(0 if size == 1 else stride for size, stride in zip(old_sizes, old_strides, strict=True))
        return replace(self, axis=axis, sizes=sizes, strides=strides)

    def viewed(self, axis: int, sizes: tuple[int, ...]) -> RowView | None:
        """Return ``tensor.view(...)``, or None if numbers would have to be moved."""
        pieces = []
        of_self = (slice(0, self.axis), slice(self.axis + 1, None))
        for mine, other in zip(of_self, (slice(0, axis), slice(axis + 1, None)), strict=True):
            strides = _view_strides(self.sizes[mine], self.strides[mine], sizes[other])
            if strides is None:
                return None
            pieces.append(strides)
        return replace(self, axis=axis, sizes=sizes, strides=(*pieces[0], 0, *pieces[1]))


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of contiguous numbers."""
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def row_axis(shape: Sequence[int], before: int, after: int, num_rows: int) -> int:
    """Return the axis of ``shape`` that counts the rows: ``before`` numbers are before it, ``after`` after it."""
    for axis, size in enumerate(shape):
        if size == num_rows and prod(shape[:axis]) == before and prod(shape[axis + 1 :]) == after:
            return axis
    raise NotLowerableError(f"the rows are not an axis of their own in a shape {list(shape)}")


def _view_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...], new_sizes: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of the same numbers in another shape, or None if it has no strides."""
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    merged: list[list[int]] = []  # groups of numbers at equal distances: [count, distance]
    for size, stride in kept:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    new_strides: list[int] = []
    for size in reversed(new_sizes):
        while merged and merged[-1][0] == 1:
            merged.pop()
        if size == 1:
            new_strides.append(0)
            continue
        if not merged or merged[-1][0] % size:
            return None
        new_strides.append(merged[-1][1])
        merged[-1] = [merged[-1][0] // size, merged[-1][1] * size]
    return tuple(reversed(new_strides))


def collapsed(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drop axes of size 1, and merge neighbouring axes if every operand's strides allow it: at least one is left.

    Returns the shape, and the strides of each operand.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for d, size in enumerate(shape):
        if size == 1:
            continue
        step = tuple(each[d] for each in strides)
        if axes and all(before == size * now for before, now in zip(axes[-1][1], step, strict=True)):
            axes[-1] = (axes[-1][0] * size, step)
        else:
            axes.append((size, step))
    if not axes:
        axes = [(1, (0,) * len(strides))]
    return tuple(size for size, _ in axes), [tuple(step[i] for _, step in axes) for i in range(len(strides))]
