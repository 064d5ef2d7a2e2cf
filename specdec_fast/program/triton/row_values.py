"""Triton code for the numbers of a run of row operations: each number is computed where it is needed, in registers.

A value is an expression over axes. What an earlier operation of the run has written is computed at the places where it
is read (``row_index.located``), so a view, a concatenation or a rotation costs nothing; what was written before the run
is loaded. Every operation computes in fp32 and rounds to the dtype of its result, as the C++ executor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import COMPARISONS, OF_ROW, Append, Operand, RowOp
from specdec_fast.program.triton.row_choices import CHOICES
from specdec_fast.program.triton.row_index import Axis, CutError, Place, SplitError, located, of_axis, padded, place_of

TYPES = {torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
_SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
FUNCTIONS = {
    "copy": "{0}", "neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}", "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))", "reciprocal": "tl.div_rn(1.0, {0})", "exp": "exp_of({0})",
    "sin": "sin_of({0})", "cos": "cos_of({0})", "sigmoid": "sigmoid_of({0})", "silu": "silu_of({0})",
    "tanh": "tanh_of({0})", "relu": "tl.where({0} < 0.0, 0.0, {0})", "gelu": "gelu_of({0})",
    "gelu_tanh": "gelu_tanh_of({0})", "floor": "tl.floor({0})", "log": "log_of({0})", "log1p": "log1p_of({0})",
    "expm1": "expm1_of({0})", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})", "maximum": "tl.where({0} < {1}, {1}, tl.where({1} != {1}, {1}, {0}))",
    "minimum": "tl.where({0} > {1}, {1}, tl.where({1} != {1}, {1}, {0}))", "where": "tl.where({0} != 0.0, {1}, {2})",
    **{code: f"tl.where({{0}} {_SYMBOLS[code]} {{1}}, 1.0, 0.0)" for code in COMPARISONS},
}  # fmt: skip


_OF_ROW = {code: name for name, code in OF_ROW.items()}


class NotEmittableError(Exception):
    """Step ``step`` of a run must read memory: what it reads of the run is no sum over its axes."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


class Value(NamedTuple):
    """A name in the code, or a number; its axes, by number, are those of the tensor."""

    text: str
    axes: tuple[Axis, ...] = ()


class Pointers:
    """The tensors that a kernel receives, in the order in which its code names them.

    Attributes:
        tensors: what each pointer is: a buffer, a constant, or the name of a tensor of the batch.

    """

    def __init__(self) -> None:
        self.tensors: list[int | Tensor | str] = []

    def name(self, source: int | Tensor | str) -> str:
        """Return the name of a pointer: to the first number of a constant, or of a buffer's row 0."""
        for i, known in enumerate(self.tensors):
            if known is source or (not isinstance(source, Tensor) and type(known) is type(source) and known == source):
                return f"p{i}"
        self.tensors.append(source)
        return f"p{len(self.tensors) - 1}"


class Values:
    """The code for the numbers that some stores need.

    Args:
        steps: the steps of the run.
        pointers: the tensors of its kernel.
        row_sizes: numbers from one row of a buffer to the next, by buffer.
        tile: an axis of which each program computes a part, and the numbers of a part; None: it computes all.

    Attributes:
        lines: the code so far.
        reduced: the steps that reduce vectors, with the axes on which each result depends.
        widest: the largest number of elements of a tensor.
        prefix: of the names of its lines.

    """

    prefix = "x"

    def __init__(
        self,
        steps: Sequence[RowOp | Append],
        pointers: Pointers,
        row_sizes: dict[int, int],
        tile: tuple[Axis, int] | None = None,
    ) -> None:
        self.steps, self.pointers, self.row_sizes, self._tile = steps, pointers, row_sizes, tile
        self.lines: list[str] = []
        self.reduced: dict[int, list[tuple[Axis, ...]]] = {}
        self.widest = 1
        self.axes: dict[Axis, str] = {}
        self._known: dict[tuple[object, ...], Value] = {}
        self._vectors: dict[tuple[object, ...], Axis] = {}

    def share(self, axis: Axis) -> None:
        """Let sums over whole rows of ``axis.size`` numbers run over this axis: its values are then computed once."""
        self._vectors[((), axis.size)] = axis

    def line(self, expression: str, axes: tuple[Axis, ...] = ()) -> Value:
        """Add a line that names the value of an expression; equal ones are computed once."""
        key = ("line", expression)
        if key not in self._known:
            name = f"{self.prefix}{len(self.lines)}"
            self.lines.append(f"{name} = {expression}")
            self._known[key] = Value(name, axes)
            self.widest = max(self.widest, prod(map(self.block, axes)))
        return self._known[key]

    def index(self, place: Place) -> Value:
        """Return a place as integers."""
        axes = place.axes
        terms = [f"{self.axis(a, axes)} * {f}" if f != 1 else self.axis(a, axes) for a, f in place.terms]
        return Value(" + ".join([*terms, str(place.constant)] if place.constant or not terms else terms), axes)

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

    def load(self, source: int | Tensor, place: Place) -> Value:
        """Return numbers in memory, as fp32."""
        pointer, index = self.pointers.name(source), self.index(place)
        base = f"{pointer} + row * {self.row_sizes[source]}" if isinstance(source, int) else pointer
        mask = self.mask(index.axes)
        masked = f", mask={mask}, other=0.0" if mask else ""
        return self.line(f"tl.load({base} + ({index.text}){masked}).to(tl.float32)", index.axes)

    def read(self, source: int | Tensor | float, place: Place, before: int) -> Value:
        """Return the numbers at a place of a row or a constant, as they are before a step."""
        if isinstance(source, float):
            return self.line(f"tl.full([], {_literal(source)}, tl.float32)")
        if isinstance(source, Tensor):
            return self.load(source, place)
        for number in reversed(range(before)):
            step = self.steps[number]
            if isinstance(step, RowOp) and step.out.source == source:
                coordinates = located(place, step.out.offset, step.shape_of(step.out), step.out.strides)
                if coordinates is not None:
                    key = (number, coordinates)
                    if key not in self._known:
                        self._known[key] = self._result(number, step, coordinates)
                    return self._known[key]
        later = (n for n in range(before, len(self.steps)) if source in self.steps[n].writes)
        if (overwritten := next(later, None)) is not None:
            raise NotEmittableError(overwritten, "numbers are overwritten that the run has read from memory")
        return self.load(source, place)

    def aligned(self, value: Value, axes: tuple[Axis, ...]) -> str:
        """Return a value as a tensor with more axes."""
        return value.text + _expanded(value.axes, axes) if value.axes else value.text

    def combined(self, template: str, values: Sequence[Value]) -> Value:
        """Add a line of values by number, each with the axes of all."""
        axes = tuple(sorted({axis for value in values for axis in value.axes}, key=lambda axis: axis.number))
        return self.line(template.format(*(self.aligned(value, axes) for value in values)), axes)

    def _result(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
        if step.code == "embedding":
            return self._rounded(self._embedding(number, step, at), step.out)
        if step.code in _OF_ROW:
            integer = self.line(f"tl.load({self.pointers.name(_OF_ROW[step.code])} + source)")
            return self._rounded(self.line(f"({integer.text} + {int(step.scalar)}).to(tl.float32)"), step.out)
        if step.code in FUNCTIONS:
            values = [self.at(operand, at, number) for operand in step.inputs]
            if step.code == "copy" and step.out.dtype in (step.inputs[0].dtype, torch.float32):
                return values[0]
            return self._rounded(self.combined(FUNCTIONS[step.code], values), step.out)
        if step.code in CHOICES:
            return CHOICES[step.code](self, number, step, at)
        if step.code in ("mean", "sum", "softmax", "layer_norm"):
            return self._rounded(self._of_vectors(number, step, at), step.out)
        raise NotEmittableError(-1, f"{step.code} has no counterpart in Triton")

    def _of_vectors(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
        statistics = self.statistics(number, step, at[:-1])
        if step.code in ("mean", "sum"):
            return statistics[0]
        values = [self.at(operand, at, number) for operand in step.inputs]
        if step.code == "softmax":
            return self.combined("tl.div_rn(exp_of({0} - {1}), {2})", [*values, *statistics])
        return self.combined("({0} - {3}) * {4} * {1} + {2}", [*values, *statistics])

    def _embedding(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
        table = step.inputs[0].source
        assert isinstance(table, Tensor)
        if len(step.inputs) > 1:
            chosen = f"{self.at(step.inputs[1], at, number).text}.to(tl.int64)"
        else:
            ids = self.pointers.name("positions" if step.by_position else "token_ids")
            shift = f" + {int(step.scalar)}" if step.by_position and step.scalar else ""
            chosen = f"(tl.load({ids} + source){shift})"
        first = self.line(f"{chosen} * {table.shape[1]}")
        index = self.index(at[0])
        mask = self.mask(index.axes)
        masked = f", mask={mask}, other=0.0" if mask else ""
        pointer = self.pointers.name(table)
        return self.line(f"tl.load({pointer} + {first.text} + ({index.text}){masked}).to(tl.float32)", index.axes)

    def at(self, operand: Operand, at: Sequence[Place], before: int) -> Value:
        """Return the numbers of an operand of step ``before`` at some coordinates."""
        return self.read(operand.source, place_of(operand.offset, operand.strides, at), before)

    def _rounded(self, value: Value, out: Operand) -> Value:
        if out.dtype == torch.float32:
            return value
        return self.line(f"{value.text}.to({TYPES[out.dtype]}).to(tl.float32)", value.axes)

    def vector(
        self, number: int, operand: Operand, outer: Sequence[Place], own_axis: bool = False
    ) -> tuple[Value, tuple[Axis, ...], Axis]:
        """Return a step's vectors of an operand, the axes of all their numbers, and that along the vectors.

        Args:
            number: of the step.
            operand: what it reads.
            outer: the coordinates of the vectors.
            own_axis: whether no other step shares the axis.

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

    def statistics(self, number: int, step: RowOp, outer: Sequence[Place]) -> list[Value]:
        """Return what an operation needs to know of each vector: its sum, or two numbers."""
        length = step.inputs[0].length
        numbers, wide, axis = self.vector(number, step.inputs[0], outer)
        reduce = lambda value, how: self.over(axis, how, value, wide)  # noqa: E731
        if step.code == "softmax":
            largest = reduce(numbers, "max")
            return [largest, reduce(self.combined("exp_of({0} - {1})", [numbers, largest]), "sum")]
        total = reduce(numbers, "sum")
        if step.code == "sum":
            return [total]
        mean = self.line(f"tl.div_rn({total.text}, {_literal(float(length))})", total.axes)
        if step.code == "mean":
            return [mean]
        squares = reduce(self.combined("({0} - {1}) * ({0} - {1})", [numbers, mean]), "sum")
        variance = self.line(f"tl.div_rn({squares.text}, {_literal(float(length))})", squares.axes)
        scale = f"tl.div_rn(1.0, tl.sqrt_rn({variance.text} + {_literal(step.scalar)}))"
        return [mean, self.line(scale, variance.axes)]

    def over(self, axis: Axis, how: str, value: Value, axes: tuple[Axis, ...]) -> Value:
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


def _literal(number: float) -> str:
    return repr(number) if abs(number) < float("inf") else f'float("{number}")'


def _expanded(axes: tuple[Axis, ...], among: tuple[Axis, ...]) -> str:
    """Return the subscript that gives a tensor the axes ``among``."""
    if len(axes) == len(among):
        return ""
    return "[" + ", ".join(":" if axis in axes else "None" for axis in among) + "]"
