"""The lines of a row's kernel, in Triton: pointers, axes, masks, loads and reductions, without any operation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import Append, Operand, RowOp
from specdec_fast.program.triton.row_index import Axis, CutError, Place, SplitError, of_axis, padded, place_of

TYPES = {torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}


class NotEmittableError(Exception):
    """Step ``step`` of a fusion must read memory: what it reads of the fusion is no sum over its axes."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


class Expression(NamedTuple):
    """A name in the code, or a number; its axes, by number, are those of the tensor."""

    text: str
    axes: tuple[Axis, ...] = ()


class Pointers:
    """The tensors that a kernel receives, in its order: buffers, constants, or names of tensors of the batch."""

    def __init__(self) -> None:
        self.tensors: list[int | Tensor | str] = []

    def name(self, source: int | Tensor | str) -> str:
        """Return the name of a pointer: to the first number of a constant, or of a buffer's row 0."""
        for i, known in enumerate(self.tensors):
            if known is source or (not isinstance(source, Tensor) and type(known) is type(source) and known == source):
                return f"p{i}"
        self.tensors.append(source)
        return f"p{len(self.tensors) - 1}"


class RowCode:
    """Lines of a kernel, each of which names an expression, and what every line of a row's code may need.

    Args:
        steps: the steps of the fusion.
        pointers: the tensors of its kernel.
        row_sizes: numbers from one row of a buffer to the next, by buffer.
        tile: an axis of which each program computes a part, and the numbers of a part; None: it computes all.

    Attributes:
        lines: the code so far; ``prefix`` begins their names.
        reduced: the steps that reduce vectors, with the axes on which each result depends.
        widest: the largest number of elements of a tensor.
    """

    prefix = "x"

    def __init__(
        self,
        steps: Sequence[RowOp | Append],
        pointers: Pointers,
        row_sizes: dict[int, int],
        tile: tuple[Axis, int] | None = None,
    ) -> None:
        self.steps = steps
        self.pointers = pointers
        self.row_sizes = row_sizes
        self._tile = tile
        self.lines: list[str] = []
        self.reduced: dict[int, list[tuple[Axis, ...]]] = {}
        self.widest = 1
        self.axes: dict[Axis, str] = {}
        self._known: dict[tuple[object, ...], Expression] = {}
        self._vectors: dict[tuple[object, ...], Axis] = {}

    def share(self, axis: Axis) -> None:
        """Let sums over whole rows of ``axis.size`` numbers run over this axis: its values are then computed once."""
        self._vectors[((), axis.size)] = axis

    def line(self, expression: str, axes: tuple[Axis, ...] = ()) -> Expression:
        """Add a line that names the value of an expression; equal ones are computed once."""
        key = ("line", expression)
        if key not in self._known:
            name = f"{self.prefix}{len(self.lines)}"
            self.lines.append(f"{name} = {expression}")
            self._known[key] = Expression(name, axes)
            self.widest = max(self.widest, prod(map(self.block, axes)))
        return self._known[key]

    def index(self, place: Place) -> Expression:
        """Return a place as integers."""
        axes = place.axes
        terms = [f"{self.axis(a, axes)} * {f}" if f != 1 else self.axis(a, axes) for a, f in place.terms]
        return Expression(" + ".join([*terms, str(place.constant)] if place.constant or not terms else terms), axes)

    def axis(self, axis: Axis, among: tuple[Axis, ...]) -> str:
        """Return the name of an axis' numbers as a tensor with the axes ``among``."""
        name = self.axes.setdefault(axis, f"a{len(self.axes)}")
        return name + _expanded((axis,), among)

    def mask(self, axes: tuple[Axis, ...]) -> str:
        """Return a condition that is false for the padding of axes; empty if there is none."""
        return " & ".join(f"({self.axis(axis, axes)} < {axis.size})" for axis in axes if axis.size % self.block(axis))

    def block(self, axis: Axis) -> int:
        """Return the numbers of an axis in a tensor, a power of two."""
        return self._tile[1] if self._tile is not None and axis is self._tile[0] else padded(axis)

    def load(self, source: int | Tensor, place: Place) -> Expression:
        """Return numbers in memory, as fp32."""
        pointer = self.pointers.name(source)
        index = self.index(place)
        base = f"{pointer} + row * {self.row_sizes[source]}" if isinstance(source, int) else pointer
        mask = self.mask(index.axes)
        masked = f", mask={mask}, other=0.0" if mask else ""
        return self.line(f"tl.load({base} + ({index.text}){masked}).to(tl.float32)", index.axes)

    def read(self, source: int | Tensor | float, place: Place, before: int) -> Expression:
        """Return the numbers at a place of a row or a constant, as they are before a step."""
        raise NotImplementedError

    def at(self, operand: Operand, at: Sequence[Place], before: int) -> Expression:
        """Return the numbers of an operand of step ``before`` at some coordinates."""
        return self.read(operand.source, place_of(operand.offset, operand.strides, at), before)

    def vector(
        self, number: int, operand: Operand, outer: Sequence[Place], own_axis: bool = False
    ) -> tuple[Expression, tuple[Axis, ...], Axis]:
        """Return a step's vectors of operand ``number``, the axes of all their numbers, and that along the vectors.

        ``outer`` are the coordinates of the vectors. With ``own_axis``, no other step shares the axis.
        """
        outer_axes = tuple(sorted({a for p in outer for a in p.axes}, key=lambda a: a.number))
        length = operand.length
        self.reduced.setdefault(number, []).append(outer_axes)
        key = (outer_axes, length, number, operand) if own_axis else (outer_axes, length)
        axis = self._vectors.setdefault(key, Axis(length))
        try:
            numbers = self.at(operand, (*outer, of_axis(axis)), number)
        except (SplitError, CutError) as error:
            if error.axis is axis:
                raise NotEmittableError(number, "a sum over numbers that several operations wrote") from None
            raise
        wide = tuple(sorted({*outer_axes, axis}, key=lambda a: a.number)) if length > 1 else outer_axes
        return numbers, wide, axis

    def aligned(self, value: Expression, axes: tuple[Axis, ...]) -> str:
        """Return a value as a tensor with more axes."""
        return value.text + _expanded(value.axes, axes) if value.axes else value.text

    def combined(self, template: str, values: Sequence[Expression]) -> Expression:
        """Add a line of values by number, each with the axes of all."""
        axes = tuple(sorted({axis for value in values for axis in value.axes}, key=lambda axis: axis.number))
        return self.line(template.format(*(self.aligned(value, axes) for value in values)), axes)

    def over(self, axis: Axis, how: str, value: Expression, axes: tuple[Axis, ...]) -> Expression:
        """Add a line that reduces a value with some axes ("sum", "max") over one of them."""
        if axis.size == 1:
            return value
        text = self.aligned(value, axes)
        if value.axes != axes:  # numbers that repeat along an axis
            text = f"tl.broadcast_to({text}, [{', '.join(str(self.block(a)) for a in axes)}])"
        if axis.size % self.block(axis):
            lowest = "0.0" if how == "sum" else 'float("-inf")'
            text = f"tl.where({self.axis(axis, axes)} < {axis.size}, {text}, {lowest})"
        kept = tuple(each for each in axes if each is not axis)
        return self.line(f"tl.{how}({text}, axis={axes.index(axis)})", kept)


def literal(number: float) -> str:
    """Return a number as source."""
    return repr(number) if abs(number) < float("inf") else f'float("{number}")'


def _expanded(axes: tuple[Axis, ...], among: tuple[Axis, ...]) -> str:
    if len(axes) == len(among):
        return ""
    return "[" + ", ".join(":" if axis in axes else "None" for axis in among) + "]"
