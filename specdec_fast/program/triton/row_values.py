"""Triton code for the numbers of a fusion of row operations: each number is computed where it is needed, in registers.

A value is an expression over axes. What an earlier operation of the fusion has written is computed at the places where
it is read (``row_index.located``), so a view, a concatenation or a rotation costs nothing; what was written before the
fusion is loaded. Every operation computes in fp32 and rounds to the dtype of its result, as the C++ executor does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import COMPARISONS, OF_ROW, Operand, RowOp
from specdec_fast.program.triton.row_choices import CHOICES
from specdec_fast.program.triton.row_code import TYPES, Expression, NotEmittableError, RowCode, literal
from specdec_fast.program.triton.row_index import Place, located

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


class Values(RowCode):
    """The code for the numbers that some stores need."""

    def read(self, source: int | Tensor | float, place: Place, before: int) -> Expression:
        if isinstance(source, float):
            return self.line(f"tl.full([], {literal(source)}, tl.float32)")
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
            raise NotEmittableError(overwritten, "numbers are overwritten that the fusion has read from memory")
        return self.load(source, place)

    def _result(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
        if step.code in ("embedding", "embedding_part"):
            rows = self._embedding(number, step, at) if step.code == "embedding" else self._embedding_part(step, at)
            return self._rounded(rows, step.out)
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

    def _of_vectors(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
        statistics = self.statistics(number, step, at[:-1])
        if step.code in ("mean", "sum"):
            return statistics[0]
        values = [self.at(operand, at, number) for operand in step.inputs]
        if step.code == "softmax":
            return self.combined("tl.div_rn(exp_of({0} - {1}), {2})", [*values, *statistics])
        return self.combined("({0} - {3}) * {4} * {1} + {2}", [*values, *statistics])

    def _embedding(self, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
        if len(step.inputs) > 1:
            chosen = f"{self.at(step.inputs[1], at, number).text}.to(tl.int64)"
        else:
            ids = self.pointers.name("positions" if step.by_position else "token_ids")
            shift = f" + {int(step.scalar)}" if step.by_position and step.scalar else ""
            chosen = f"(tl.load({ids} + source){shift})"
        return self._row_of_table(step, at, chosen)

    def _embedding_part(self, step: RowOp, at: tuple[Place, ...]) -> Expression:
        table = step.inputs[0].source
        assert isinstance(table, Tensor)
        chosen = self.line(f"tl.load({self.pointers.name('token_ids')} + source) - {int(step.scalar)}").text
        is_here = self.line(f"({chosen} >= 0) & ({chosen} < {table.shape[0]})").text
        numbers = self._row_of_table(step, at, self.line(f"tl.where({is_here}, {chosen}, 0)").text)
        return self.line(f"tl.where({is_here}, {numbers.text}, 0.0)", numbers.axes)

    def _row_of_table(self, step: RowOp, at: tuple[Place, ...], chosen: str) -> Expression:
        table = step.inputs[0].source
        assert isinstance(table, Tensor)
        first = self.line(f"{chosen} * {table.shape[1]}")
        index = self.index(at[0])
        mask = self.mask(index.axes)
        masked = f", mask={mask}, other=0.0" if mask else ""
        pointer = self.pointers.name(table)
        return self.line(f"tl.load({pointer} + {first.text} + ({index.text}){masked}).to(tl.float32)", index.axes)

    def _rounded(self, value: Expression, out: Operand) -> Expression:
        if out.dtype == torch.float32:
            return value
        return self.line(f"{value.text}.to({TYPES[out.dtype]}).to(tl.float32)", value.axes)

    def statistics(self, number: int, step: RowOp, outer: Sequence[Place]) -> list[Expression]:
        """Return what an operation needs to know of each vector: its sum, or two numbers."""
        length = step.inputs[0].length
        numbers, wide, axis = self.vector(number, step.inputs[0], outer)

        def reduce(value: Expression, how: str) -> Expression:
            return self.over(axis, how, value, wide)

        if step.code == "softmax":
            largest = reduce(numbers, "max")
            return [largest, reduce(self.combined("exp_of({0} - {1})", [numbers, largest]), "sum")]
        total = reduce(numbers, "sum")
        if step.code == "sum":
            return [total]
        mean = self.line(f"tl.div_rn({total.text}, {literal(float(length))})", total.axes)
        if step.code == "mean":
            return [mean]
        squares = reduce(self.combined("({0} - {1}) * ({0} - {1})", [numbers, mean]), "sum")
        variance = self.line(f"tl.div_rn({squares.text}, {literal(float(length))})", squares.axes)
        scale = f"tl.div_rn(1.0, tl.sqrt_rn({variance.text} + {literal(step.scalar)}))"
        return [mean, self.line(scale, variance.axes)]
