"""The instructions for operations that compute: functions, linear layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import COMPARISONS, ROWS
from specdec_fast.program.record.lower_sums import product_of_matrices
from specdec_fast.program.record.lowering_table import Lowerings
from specdec_fast.program.record.operands import FLOATS, LARGEST_WHOLE, WHOLE
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Extent, Index, Preceding
from specdec_fast.quantization.packed_weight import PackedWeight

LOWERED = Lowerings()
ARITHMETIC = ("add", "sub", "mul", "div")


@LOWERED.entry("linear.default")
def _linear(tape: Tape, result: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if tape.value(weight) is not None:
        raise NotLowerableError("weights that depend on the rows")
    tape.linear(tape.row_view(rows), weight, bias, result)


@LOWERED.entry("quantized_linear.default")
def _quantized_linear(tape: Tape, result: Tensor, rows: Tensor, codes: Tensor, scales: Tensor, *others: Any) -> None:
    mins, table, bias, *fields = others
    weight = PackedWeight(codes, scales, mins, table, *fields)
    tape.quantized_linear(tape.row_view(rows), weight, bias, result)


@LOWERED.entry("rank_sum.default")
def _rank_sum(tape: Tape, result: Tensor, rows: Tensor, ranks: int) -> None:
    tape.exchange(rows, ranks, (), result)


@LOWERED.entry("rank_concatenate.default")
def _rank_concatenate(tape: Tape, result: Tensor, rows: Tensor, ranks: int, widths: list[int]) -> None:
    tape.exchange(rows, ranks, tuple(widths), result)


@LOWERED.entry("matmul.default", "mm.default", "bmm.default")
def _product(tape: Tape, result: Tensor, left: Tensor, right: Tensor) -> None:
    """Lower a linear layer, the product of frequencies and positions in rotary embeddings, or of a row's matrices."""
    if left.shape[-1] == 1:
        _binary(tape, result, left, right, code="mul")
    elif tape.value(right) is None and right.dim() == 2:
        tape.linear(tape.row_view(left), right.t(), None, result)
    elif tape.value(left) is None and left.dim() == 2 and tape.row_view(right).axis == right.dim() - 1:
        # a linear layer whose rows are columns: weight @ rows^T
        transposed = result.transpose(-1, -2)
        tape.linear(tape.row_view(right).permuted(_last_swapped(right.dim())), left, None, transposed)
        tape.bind(result, tape.row_view(transposed).permuted(_last_swapped(result.dim())))
    else:
        product_of_matrices(tape, result, left, right)


def _last_swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


@LOWERED.entry("addmm.default")
def _addmm(
    tape: Tape, result: Tensor, bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    if (beta, alpha) != (1, 1) or tape.value(weight) is not None or tape.value(bias) is not None:
        raise NotLowerableError("addmm with a factor, or with weights that depend on the rows")
    tape.linear(tape.row_view(rows), weight.t(), bias, result)


_UNARY = {
    "neg.default": "neg", "abs.default": "abs", "sqrt.default": "sqrt", "rsqrt.default": "rsqrt",
    "reciprocal.default": "reciprocal", "exp.default": "exp", "sin.default": "sin", "cos.default": "cos",
    "sigmoid.default": "sigmoid", "silu.default": "silu", "tanh.default": "tanh", "relu.default": "relu",
    "square.default": "square", "floor.default": "floor", "log.default": "log", "log1p.default": "log1p",
    "expm1.default": "expm1",
}  # fmt: skip
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "copy"}


def _unary(tape: Tape, result: Tensor, source: Tensor, *, code: str) -> None:
    view = tape.numbers(source)
    if result.dtype in WHOLE:
        raise NotLowerableError(f"{code} of integers")
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op(code, [view], out)
    tape.bind(result, out)


LOWERED |= {name: partial(_unary, code=code) for name, code in _UNARY.items()}


@LOWERED.entry("softplus.default")
def _softplus(tape: Tape, result: Tensor, source: Tensor, beta: float = 1, threshold: float = 20) -> None:
    """Record ``log(1 + exp(beta * x)) / beta``, and ``x`` beyond the threshold, as its parts in fp32, rounded once."""
    view = tape.row_view(source)
    scaled, is_beyond, power, log, divided = (
        tape.fresh(view.domain, view.axis, view.sizes, torch.float32) for _ in range(5)
    )
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("mul", [view, float(beta)], scaled)
    tape.row_op("exp", [scaled], power)
    tape.row_op("log1p", [power], log)
    tape.row_op("div", [log, float(beta)], divided)
    tape.row_op("gt", [scaled, float(threshold)], is_beyond)
    tape.row_op("where", [is_beyond, view, divided], out)
    tape.bind(result, out)


@LOWERED.entry("gelu.default")
def _gelu(tape: Tape, result: Tensor, source: Tensor, *, approximate: str = "none") -> None:
    _unary(tape, result, source, code="gelu" if approximate == "none" else "gelu_tanh")


@LOWERED.entry("pow.Tensor_Scalar")
def _pow(tape: Tape, result: Tensor, source: Tensor, exponent: float) -> None:
    if exponent == 3:
        view = tape.row_view(source)
        cube = tape.fresh_like(result, view.axis, view.domain)
        square = tape.fresh(view.domain, view.axis, view.sizes, torch.float32)  # rounded once, at the end
        tape.row_op("square", [view], square)
        tape.row_op("mul", [square, view], cube)
        tape.bind(result, cube)
    elif exponent in _POWERS:
        _unary(tape, result, source, code=_POWERS[exponent])
    else:
        raise NotLowerableError(f"a power of {exponent}")


def _binary(tape: Tape, result: Tensor, left: Any, right: Any, alpha: float = 1, *, code: str) -> None:
    value = tape.value(left)
    integers = _with_numbers_of_rows(tape, result, code, left, right) if alpha == 1 else None
    if integers is not None:
        tape.bind(result, integers)
    elif isinstance(value, (Index, Preceding, Extent)) and code in ("add", "sub") and isinstance(right, int):
        added = int(right * alpha) * (1 if code == "add" else -1)
        shifted = value.shifted(added) if isinstance(value, Extent) else replace(value, added=value.added + added)
        tape.bind(result, shifted)
    elif alpha != 1:
        raise NotLowerableError(f"{code} with a factor")
    else:
        elementwise(tape, result, code, left, right)


def _with_numbers_of_rows(tape: Tape, result: Tensor, code: str, left: Any, right: Any) -> Index | Preceding | None:
    """Return positions minus the numbers of the rows in a forward, or the sum of both: the positions again."""
    value = tape.value(left)
    if code == "sub" and isinstance(value, Index) and value.kind == "positions":
        first = _first_number_of_rows(tape, result, right)
        return None if first is None else Preceding(value.added - first)
    for one, other in ((left, right), (right, left)):
        value = tape.value(one)
        if code == "add" and isinstance(value, Preceding):
            first = _first_number_of_rows(tape, result, other)
            return None if first is None else Index("positions", value.added + first)
    return None


def _first_number_of_rows(tape: Tape, result: Tensor, numbers: Any) -> int | None:
    """Return the first of successive integers, one for each row; None if ``numbers`` are others."""
    num_rows = tape.counts[ROWS]
    if not isinstance(numbers, Tensor) or tape.value(numbers) is not None or numbers.dtype != torch.int64:
        return None
    if numbers.numel() != num_rows or result.numel() != num_rows:
        return None
    first = int(numbers.flatten()[0])
    successive = torch.arange(first, first + num_rows, device=numbers.device)
    return first if torch.equal(numbers.flatten(), successive) else None


def elementwise(tape: Tape, result: Tensor, code: str, *operands: Any) -> None:
    """Record a function of several tensors or numbers that are broadcast to each other."""
    dtype = torch.result_type(*operands) if code in COMPARISONS else result.dtype
    values = [_as_operand(tape, each, dtype, code) for each in operands]
    views = [each for each in values if isinstance(each, RowView)]
    if not views or (result.dtype in WHOLE and code in ARITHMETIC):
        raise NotLowerableError(f"{code} of integers")
    out = tape.fresh_like(result, views[0].axis + result.dim() - len(views[0].sizes), views[0].domain)
    tape.row_op(code, values, out)
    tape.bind(result, out)


LOWERED |= {f"{code}.{form}": partial(_binary, code=code) for code in ARITHMETIC for form in ("Tensor", "Scalar")}


def _as_operand(tape: Tape, value: Any, dtype: torch.dtype, code: str) -> RowView | Tensor | float:
    """Return an operand as PyTorch converts it: integers to the dtype, and numbers, except for those of arithmetic."""
    if isinstance(value, Tensor) and (tape.value(value) is not None or value.dim()):
        if tape.value(value) is None:
            return value
        view = tape.numbers(value)
        return tape.copied(view, dtype) if dtype in FLOATS[1:] and value.dtype in WHOLE[1:] else view
    if code in ARITHMETIC or dtype not in FLOATS[1:]:
        number = float(value)
        if dtype in WHOLE and abs(number) > LARGEST_WHOLE:
            raise NotLowerableError(f"{code} of integers and {value}")
        return number
    return float(torch.tensor(float(value), dtype=dtype, device="cpu"))


@LOWERED.entry("rsub.Scalar", "rsub.Tensor")
def _rsub(tape: Tape, result: Tensor, left: Any, right: Any, alpha: float = 1) -> None:
    _binary(tape, result, right, left, alpha, code="sub")
