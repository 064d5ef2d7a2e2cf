"""The instructions for operations that compare and choose, as routers of experts use them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import COMPARISONS
from specdec_fast.program.record.lower_math import elementwise
from specdec_fast.program.record.lower_sums import vectors_of
from specdec_fast.program.record.lower_tables import gather
from specdec_fast.program.record.lowering_table import Lowerings
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Extent, Index

LOWERED = Lowerings()


def _function(tape: Tape, result: Tensor, left: Any, right: Any, *, code: str) -> None:
    elementwise(tape, result, code, left, right)


def _compare(tape: Tape, result: Tensor, left: Any, right: Any, *, code: str) -> None:
    extent = tape.value(left)
    if not isinstance(extent, Extent):
        elementwise(tape, result, code, left, right)
    elif tape.value(right) is not None or not extent.is_decided(code, float(right)):
        raise NotLowerableError(f"the length of the longest text is compared with {right}, which may be either way")
    # else PyTorch's result is a constant


LOWERED |= {f"{code}.{form}": partial(_compare, code=code) for code in COMPARISONS for form in ("Tensor", "Scalar")}
LOWERED |= {name: partial(_function, code="maximum") for name in ("maximum.default", "max.other")}
LOWERED |= {name: partial(_function, code="minimum") for name in ("minimum.default", "min.other")}


@LOWERED.entry("max.default")
def _max_of_all(tape: Tape, result: Tensor, source: Tensor) -> None:
    """Lower the largest position of the batch, of which a program knows only the bounds."""
    value = tape.value(source)
    if not isinstance(value, Index) or value.kind != "positions" or tape.max_positions is None:
        raise NotLowerableError("the largest number of all rows")
    tape.bind(result, Extent(value.added, value.added + tape.max_positions - 1))


@LOWERED.entry("is_nonzero.default")
def _is_nonzero(tape: Tape, result: bool, source: Tensor) -> None:
    """Lower the truth of a number as a condition of Python, if the bounds of the number decide it."""
    extent = tape.value(source)
    if not isinstance(extent, Extent) or not extent.is_decided("ne", 0):
        raise NotLowerableError("Python decides by numbers of the batch")


@LOWERED.entry("logical_not.default", "bitwise_not.default")
def _not(tape: Tape, result: Tensor, source: Tensor) -> None:
    _expect_truth(source)
    elementwise(tape, result, "eq", source, 0.0)


@LOWERED.entry("logical_and.default", "bitwise_and.Tensor", "__and__.Tensor")
def _and(tape: Tape, result: Tensor, left: Tensor, right: Tensor) -> None:
    _expect_truth(left, right)
    elementwise(tape, result, "minimum", left, right)


@LOWERED.entry("logical_or.default", "bitwise_or.Tensor", "__or__.Tensor")
def _or(tape: Tape, result: Tensor, left: Tensor, right: Tensor) -> None:
    _expect_truth(left, right)
    elementwise(tape, result, "maximum", left, right)


def _expect_truth(*tensors: Tensor) -> None:
    if any(tensor.dtype != torch.bool for tensor in tensors):
        raise NotLowerableError("a logical operation on numbers")


@LOWERED.entry("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(tape: Tape, result: Tensor, condition: Tensor, first: Any, second: Any) -> None:
    elementwise(tape, result, "where", condition, first, second)


@LOWERED.entry("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(tape: Tape, result: Tensor, source: Tensor, mask: Tensor, value: Any) -> None:
    elementwise(tape, result, "where", mask, value, source)


@LOWERED.entry("index_put.default")
def _index_put(
    tape: Tape, result: Tensor, target: Tensor, indices: Sequence[Tensor], value: Tensor, *accumulate: bool
) -> None:
    is_masked = len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].dim() == target.dim()
    if not is_masked or any(accumulate) or tape.value(value) is not None or value.numel() != 1:
        raise NotLowerableError("numbers are written to places that are no mask of every number")
    elementwise(tape, result, "where", indices[0], value.reshape(()), target)


@LOWERED.entry("clamp.default", "clamp.Tensor")
def _clamp(tape: Tape, result: Tensor, source: Tensor, least: Any = None, most: Any = None, **bounds: Any) -> None:
    least = bounds.get("min", least)
    most = bounds.get("max", most)
    if least is not None:
        elementwise(tape, result, "maximum", source, least)
    if most is not None:
        elementwise(tape, result, "minimum", source if least is None else result, most)


@LOWERED.entry("clamp_min.default", "clamp_min.Tensor")
def _clamp_min(tape: Tape, result: Tensor, source: Tensor, least: Any) -> None:
    elementwise(tape, result, "maximum", source, least)


@LOWERED.entry("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(tape: Tape, result: Tensor, source: Tensor, most: Any) -> None:
    elementwise(tape, result, "minimum", source, most)


def _filled(tape: Tape, result: Tensor, source: Tensor, number: float, *args: Any, **kwargs: Any) -> None:
    view = tape.row_view(source)
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("copy", [float(number)], out)
    tape.bind(result, out)


LOWERED["full_like.default"] = _filled


@LOWERED.entry("zeros_like.default")
def _zeros_like(tape: Tape, result: Tensor, source: Tensor, **kwargs: Any) -> None:
    _filled(tape, result, source, 0.0)


@LOWERED.entry("ones_like.default")
def _ones_like(tape: Tape, result: Tensor, source: Tensor, **kwargs: Any) -> None:
    _filled(tape, result, source, 1.0)


@LOWERED.entry("softmax.int", "_softmax.default")
def _softmax(tape: Tape, result: Tensor, source: Tensor, axis: int, *args: Any, **kwargs: Any) -> None:
    view = vectors_of(tape, "softmax", source, axis)
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("softmax", [view], out)
    tape.bind(result, out)


@LOWERED.entry("topk.default")
def _topk(
    tape: Tape,
    result: tuple[Tensor, Tensor],
    source: Tensor,
    count: int,
    axis: int = -1,
    largest: bool = True,
    is_sorted: bool = True,
) -> None:
    """Among equal numbers, as 16-bit routers have them, choose the same ones as PyTorch on a CPU."""
    view = vectors_of(tape, "topk", source, axis)
    if not largest:
        raise NotLowerableError("topk of the smallest")
    values, places = result
    chosen = tape.fresh_like(places, view.axis, view.domain)
    tape.row_op("topk", [view], chosen, scalar=float(is_sorted))
    tape.bind(places, chosen)
    gather(tape, values, source, axis, places)


@LOWERED.entry("max.dim")
def _max_of_vectors(
    tape: Tape, result: tuple[Tensor, Tensor], source: Tensor, axis: int, keepdim: bool = False
) -> None:
    view, place = _first_largest(tape, "max", source, axis)
    largest = tape.fresh(view.domain, view.axis, place.sizes, source.dtype)
    tape.row_op("gather", [view, place], largest)
    for tensor, value in zip(result, (largest, place), strict=True):
        tape.bind(tensor, value if keepdim else value.without(-1, 0))


@LOWERED.entry("argmax.default")
def _argmax(tape: Tape, result: Tensor, source: Tensor, axis: int, keepdim: bool = False) -> None:
    _, place = _first_largest(tape, "argmax", source, axis)
    tape.bind(result, place if keepdim else place.without(-1, 0))


def _first_largest(tape: Tape, name: str, source: Tensor, axis: int) -> tuple[RowView, RowView]:
    view = vectors_of(tape, name, source, axis)
    place = tape.fresh(view.domain, view.axis, (*view.sizes[:-1], 1), torch.int64)
    tape.row_op("argmax", [view], place)
    return view, place


@LOWERED.entry("scatter.value", "scatter.src")
def _scatter(tape: Tape, result: Tensor, source: Tensor, axis: int, index: Tensor, values: Any) -> None:
    view = vectors_of(tape, "scatter", source, axis)
    if isinstance(values, Tensor) and values.shape != index.shape:
        raise NotLowerableError("scatter of some numbers of a tensor")
    written = tape.row_view(values) if isinstance(values, Tensor) else float(values)
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("scatter", [view, tape.row_view(index), written], out)
    tape.bind(result, out)
