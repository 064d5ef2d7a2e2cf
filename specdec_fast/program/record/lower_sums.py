"""The instructions for operations that add up: sums, means, norms, and products of two matrices of a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.record.lowering_table import Lowerings
from specdec_fast.program.record.operands import WHOLE
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape

LOWERED = Lowerings()
_MOST_TERMS = 32  # of a product of matrices, which takes two operations for each


def vectors_of(tape: Tape, code: str, source: Tensor, *axes: int) -> RowView:
    """Return a tensor's numbers for an operation along ``axes``, which must be the last axis alone."""
    view = tape.row_view(source)
    if [axis % source.dim() for axis in axes] != [source.dim() - 1] or view.axis == source.dim() - 1:
        raise NotLowerableError(f"{code} over anything but the last axis")
    return view


def _columns_of(tape: Tape, code: str, source: Tensor, axes: Sequence[int] | None) -> tuple[RowView, list[int]]:
    """Return a tensor's numbers with the one axis along which they are added up as the last, and the order of axes."""
    view = tape.row_view(source)
    along = [axis % source.dim() for axis in axes or ()]
    if len(along) != 1 or along[0] == view.axis:
        raise NotLowerableError(f"{code} over the rows, or over several axes")
    order = [axis for axis in range(source.dim()) if axis != along[0]] + along
    return view.permuted(order), order


def _bind_sums(tape: Tape, result: Tensor, sums: RowView, order: list[int], keepdim: bool) -> None:
    """Bind sums, one number along the last axis, whose axes ``_columns_of`` has put into another order."""
    tape.bind(result, sums.permuted(_inverse(order)) if keepdim else sums.without(-1, 0))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _reduce(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    axes: Sequence[int] | None,
    keepdim: bool = False,
    *,
    code: str,
    **kwargs: Any,
) -> None:
    view, order = _columns_of(tape, code, source, axes)
    if result.dtype in WHOLE:
        raise NotLowerableError(f"{code} of integers")
    out = tape.fresh(view.domain, view.axis, (*view.sizes[:-1], 1), result.dtype)
    tape.row_op(code, [view], out)
    _bind_sums(tape, result, out, order, keepdim)


LOWERED["mean.dim"] = partial(_reduce, code="mean")
LOWERED["sum.dim_IntList"] = partial(_reduce, code="sum")


@LOWERED.entry("linalg_vector_norm.default")
def _vector_norm(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    order: float = 2,
    axes: Sequence[int] | None = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> None:
    """Record ``(sum |x|^order)^(1 / order)`` for the orders 1 and 2 as its parts in fp32, rounded once."""
    if order not in (1, 2):
        raise NotLowerableError(f"a norm of order {order}")
    view, axis_order = _columns_of(tape, "a norm", source, axes)
    sizes = (*view.sizes[:-1], 1)
    parts = tape.fresh(view.domain, view.axis, view.sizes, torch.float32)
    out = tape.fresh(view.domain, view.axis, sizes, result.dtype)
    tape.row_op("abs" if order == 1 else "square", [view], parts)
    if order == 1:
        tape.row_op("sum", [parts], out)
    else:
        total = tape.fresh(view.domain, view.axis, sizes, torch.float32)
        tape.row_op("sum", [parts], total)
        tape.row_op("sqrt", [total], out)
    _bind_sums(tape, result, out, axis_order, keepdim)


def _deviation(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    axes: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    is_root: bool,
) -> None:
    """Record ``sum((x - mean(x))^2) / (n - correction)``, or its square root, as its parts in fp32, rounded once."""
    correction = 1 if correction is None else correction
    view, order = _columns_of(tape, "a deviation", source, axes)

    def wide(sizes: tuple[int, ...]) -> RowView:
        return tape.fresh(view.domain, view.axis, sizes, torch.float32)

    sizes = (*view.sizes[:-1], 1)
    mean = wide(sizes)
    distances = wide(view.sizes)
    squares = wide(view.sizes)
    total = wide(sizes)
    tape.row_op("mean", [view], mean)
    tape.row_op("sub", [view, mean], distances)
    tape.row_op("square", [distances], squares)
    tape.row_op("sum", [squares], total)
    out = tape.fresh(view.domain, view.axis, sizes, result.dtype)
    variance = wide(sizes) if is_root else out
    tape.row_op("div", [total, float(view.sizes[-1] - correction)], variance)
    if is_root:
        tape.row_op("sqrt", [variance], out)
    _bind_sums(tape, result, out, order, keepdim)


def _unbiased(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    axes: Sequence[int] | None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    is_root: bool,
) -> None:
    _deviation(tape, result, source, axes, correction=int(unbiased), keepdim=keepdim, is_root=is_root)


for _name, _is_root in (("std", True), ("var", False)):
    LOWERED[f"{_name}.correction"] = partial(_deviation, is_root=_is_root)
    LOWERED[f"{_name}.dim"] = partial(_unbiased, is_root=_is_root)


@LOWERED.entry("layer_norm.default")
def _layer_norm(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *args: Any,
) -> None:
    if len(shape) != 1:
        raise NotLowerableError("a layer norm over several axes")
    view = tape.row_view(source)
    out = tape.fresh_like(result, view.axis, view.domain)
    factors: list[Tensor | float] = [1.0 if weight is None else weight, 0.0 if bias is None else bias]
    tape.row_op("layer_norm", [view, *factors], out, scalar=float(eps))
    tape.bind(result, out)


@LOWERED.entry("rms_norm.default")
def _rms_norm(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> None:
    """Record ``x / sqrt(mean(x^2) + eps) * weight`` as its parts, in fp32, rounded once."""
    if len(shape) != 1:
        raise NotLowerableError("an RMS norm over several axes")
    view = tape.row_view(source)

    def wide(sizes: tuple[int, ...]) -> RowView:
        return tape.fresh(view.domain, view.axis, sizes, torch.float32)

    sizes = (*view.sizes[:-1], 1)
    squares = wide(view.sizes)
    mean = wide(sizes)
    shifted = wide(sizes)
    scale = wide(sizes)
    tape.row_op("square", [view], squares)
    tape.row_op("mean", [squares], mean)
    tape.row_op("add", [mean, torch.finfo(source.dtype).eps if eps is None else eps], shifted)
    tape.row_op("rsqrt", [shifted], scale)
    out = tape.fresh_like(result, view.axis, view.domain)
    if weight is None:
        tape.row_op("mul", [view, scale], out)
    else:
        scaled = wide(view.sizes)
        tape.row_op("mul", [view, scale], scaled)
        tape.row_op("mul", [scaled, weight], out)
    tape.bind(result, out)


def product_of_matrices(tape: Tape, result: Tensor, left: Tensor, right: Tensor) -> None:
    """Record ``left @ right`` of ``[..., m, k]`` and ``[..., k, n]`` numbers of a row, one of which may be a constant.

    The products are added in fp32, from the first to the last, and rounded once. The longer axis of the result is
    contiguous in its buffer, because operations on contiguous numbers are fast.
    """
    num_terms = left.shape[-1]
    operands = [tape.row_view(each) if tape.value(each) is not None else each for each in (left, right)]
    views = [each for each in operands if isinstance(each, RowView)]
    if min(left.dim(), right.dim()) < 2 or any(view.axis >= len(view.sizes) - 2 for view in views):
        raise NotLowerableError("a matrix product that is no linear layer")
    if num_terms > _MOST_TERMS or result.dtype in WHOLE:
        raise NotLowerableError(f"a product of matrices of a row, with sums of {num_terms} numbers of {result.dtype}")
    first = views[0]
    axis = first.axis + result.dim() - len(first.sizes)

    def fresh(dtype: torch.dtype) -> RowView:
        sizes = [1 if d == axis else size for d, size in enumerate(result.shape)]
        order = list(range(len(sizes)))
        if sizes[-2] > sizes[-1]:
            order[-2:] = reversed(order[-2:])
        return tape.fresh(first.domain, axis, tuple(sizes[d] for d in order), dtype).permuted(_inverse(order))

    total: RowView | None = None
    for term in range(num_terms):
        is_last = term == num_terms - 1
        product = fresh(result.dtype if is_last and total is None else torch.float32)
        tape.row_op("mul", [_narrowed(operands[0], -1, term), _narrowed(operands[1], -2, term)], product)
        if total is not None:
            added = fresh(result.dtype if is_last else torch.float32)
            tape.row_op("add", [total, product], added)
            product = added
        total = product
    if total is None:
        raise NotLowerableError("a product of matrices without numbers")
    tape.bind(result, total)


def _narrowed(value: RowView | Tensor, axis: int, start: int) -> RowView | Tensor:
    return value.narrow(axis, start, 1) if isinstance(value, Tensor) else value.narrowed(axis, start, 1)
