"""The instructions for operations that view numbers in another shape or concatenate them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.record.in_place import writable
from specdec_fast.program.record.lowering_table import Lowerings
from specdec_fast.program.record.operands import WHOLE
from specdec_fast.program.record.row_views import NotLowerableError, RowView, row_axis
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Index

LOWERED = Lowerings()


@LOWERED.entry(
    "detach.default", "alias.default", "clone.default", "contiguous.default", "to.device", "lift_fresh.default"
)
def _alias(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    value = tape.value(source)
    assert value is not None
    tape.bind(result, value)


@LOWERED.entry("dropout.default")
def _dropout(tape: Tape, result: Tensor, source: Tensor, p: float, train: bool) -> None:
    if train and p:
        raise NotLowerableError("dropout; call model.eval()")
    _alias(tape, result, source)


@LOWERED.entry("to.dtype", "to.dtype_layout", "to.other", "_to_copy.default", "type_as.default")
def _convert(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    value = tape.value(source)
    is_index = isinstance(value, Index) and result.dtype in (torch.int32, torch.int64)
    if result.dtype == source.dtype or is_index:
        _alias(tape, result, source)
    elif isinstance(value, Index) and result.is_floating_point():
        tape.bind(result, tape.numbers(source, like=result))
    elif result.dtype == torch.bool:
        view = tape.numbers(source)
        out = tape.fresh_like(result, view.axis, view.domain)
        tape.row_op("ne", [view, 0.0], out)
        tape.bind(result, out)
    elif result.dtype in WHOLE:
        if source.dtype not in WHOLE:
            raise NotLowerableError(f"numbers of {source.dtype} cut to whole ones")
        _alias(tape, result, source)
    else:
        tape.bind(result, tape.copied(tape.row_view(source), result.dtype))


@LOWERED.entry(
    "view.default", "_unsafe_view.default", "reshape.default", "view_as.default", "reshape_as.default",
    "flatten.using_ints", "unflatten.int", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default",
)  # fmt: skip
def _view(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    value = tape.value(source)
    if isinstance(value, Index):
        rows = tape.index_axis(source)
        before = prod(source.shape[:rows])
        after = prod(source.shape[rows + 1 :])
        row_axis(result.shape, before, after, source.shape[rows])
        tape.bind(result, value)
        return None
    view = tape.row_view(source)
    apart = _rows_apart(tape, view, result)
    tape.bind(apart, tape.reshaped(view, tuple(apart.shape)))
    return apart


def _rows_apart(tape: Tape, view: RowView, result: Tensor) -> Tensor:
    """Return ``result``; or, if its first axis joins the rows with an axis after them, the two axes apart.

    Such as the heads of all rows, ``[T * heads, size]``, which a model norms one by one. Operations that treat the
    first axis as a batch compute the same of ``[T, heads, size]``, which the model goes on with.
    """
    num_rows = tape.counts[view.domain]
    size = result.shape[0] if result.dim() > 1 else 0
    follows = prod(view.sizes[view.axis + 1 :])
    joins = size > num_rows and size % num_rows == 0 and size // num_rows * prod(result.shape[1:]) == follows
    if not joins or prod(view.sizes[: view.axis]) != 1:
        return result
    return result.view(num_rows, size // num_rows, *result.shape[1:])


@LOWERED.entry("permute.default")
def _permute(tape: Tape, result: Tensor, source: Tensor, order: Sequence[int]) -> None:
    value = tape.value(source)
    tape.bind(result, value if isinstance(value, Index) else tape.row_view(source).permuted(order))


@LOWERED.entry("transpose.int", "swapaxes.default", "swapdims.default")
def _transpose(tape: Tape, result: Tensor, source: Tensor, first: int, second: int) -> None:
    order = list(range(source.dim()))
    order[first], order[second] = order[second], order[first]
    _permute(tape, result, source, order)


@LOWERED.entry("t.default")
def _t(tape: Tape, result: Tensor, source: Tensor) -> None:
    _transpose(tape, result, source, 0, source.dim() - 1)


@LOWERED.entry("expand.default", "expand_as.default")
def _expand(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    value = tape.value(source)
    if isinstance(value, Index):
        tape.index_axis(result)
        tape.bind(result, value)
        return
    view = tape.row_view(source)
    axis = view.axis + result.dim() - source.dim()
    tape.bind(result, view.expanded(axis, tuple(1 if d == axis else size for d, size in enumerate(result.shape))))


@LOWERED.entry("repeat.default")
def _repeat(tape: Tape, result: Tensor, source: Tensor, repeats: Sequence[int]) -> None:
    """Lower ``source.repeat(...)``: every axis becomes one of repeats and the axis itself, which are then merged."""
    view = tape.row_view(source)
    added = result.dim() - source.dim()
    if repeats[view.axis + added] != 1:
        raise NotLowerableError("rows are repeated")
    sizes = (1,) * added + view.sizes
    axis = 2 * (view.axis + added) + 1
    apart = view.viewed(axis, tuple(size for each in sizes for size in (1, each)))
    assert apart is not None, "axes of size 1 move no numbers"
    repeated = apart.expanded(axis, tuple(size for pair in zip(repeats, sizes, strict=True) for size in pair))
    tape.bind(result, tape.reshaped(repeated, tuple(result.shape)))


@LOWERED.entry("select.int")
def _select(tape: Tape, result: Tensor, source: Tensor, axis: int, index: int) -> None:
    value = tape.value(source)
    if isinstance(value, Index) and axis % source.dim() != tape.index_axis(source):
        tape.bind(result, value)
        return
    view = tape.row_view(source)
    if axis % source.dim() == view.axis:
        raise NotLowerableError("one row is picked out of the batch")
    tape.bind(result, view.without(axis, index))


@LOWERED.entry("slice.Tensor")
def _slice(
    tape: Tape,
    result: Tensor,
    source: Tensor,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> None:
    value = tape.value(source)
    if result.shape == source.shape or (isinstance(value, Index) and axis % source.dim() != tape.index_axis(source)):
        _alias(tape, result, source)
        return
    view = tape.row_view(source)
    if axis % source.dim() == view.axis:
        raise NotLowerableError("rows are cut out of the batch")
    first, _, _ = slice(start, end, step).indices(source.shape[axis])
    tape.bind(result, view.narrowed(axis, first, result.shape[axis], step))


@LOWERED.entry("split.Tensor", "split_with_sizes.default", "chunk.default")
def _split(tape: Tape, result: Sequence[Tensor], source: Tensor, how: Any, axis: int = 0) -> None:
    view = tape.row_view(source)
    start = 0
    if axis % source.dim() == view.axis:
        raise NotLowerableError("the batch is split between rows")
    for piece in result:
        tape.bind(piece, view.narrowed(axis, start, piece.shape[axis]))
        start += piece.shape[axis]


@LOWERED.entry("unbind.int")
def _unbind(tape: Tape, result: Sequence[Tensor], source: Tensor, axis: int = 0) -> None:
    for index, piece in enumerate(result):
        _select(tape, piece, source, axis, index)


@LOWERED.entry("cat.default", "concat.default", "concatenate.default")
def _cat(tape: Tape, result: Tensor, sources: Sequence[Tensor], axis: int = 0) -> None:
    rows = next(source for source in sources if tape.value(source) is not None)
    view = tape.row_view(rows)
    start = 0
    if axis % result.dim() == view.axis:
        raise NotLowerableError("rows are appended to the batch")
    out = tape.fresh_like(result, view.axis, view.domain)
    for source in sources:
        size = source.shape[axis]
        part = source if tape.value(source) is None else tape.row_view(source)
        tape.row_op("copy", [part], out.narrowed(axis, start, size))
        start += size
    tape.bind(result, out)


@LOWERED.entry("new_empty.default", "empty_like.default")
def _empty(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    domain = tape.row_view(source).domain
    axes = [d for d, size in enumerate(result.shape) if size == tape.counts[domain]]
    if len(axes) != 1:
        raise NotLowerableError(f"memory of shape {list(result.shape)}, of which no one axis counts the rows")
    tape.bind(result, tape.fresh_like(result, axes[0], domain))


@LOWERED.entry("copy_.default")
def _copy(tape: Tape, result: Tensor, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    """Lower a copy into a tensor, often a part of one that ``_empty`` has made; all its views share the buffer."""
    view = writable(tape, target)
    if not target.is_floating_point():
        raise NotLowerableError(f"numbers are written into a tensor of {target.dtype}")
    tape.row_op("copy", [source if tape.value(source) is None else tape.row_view(source)], view)
    tape.bind(result, view)


@LOWERED.entry("stack.default")
def _stack(tape: Tape, result: Tensor, sources: Sequence[Tensor], axis: int = 0) -> None:
    axis %= result.dim()
    rows = tape.row_view(sources[0]).axis
    out = tape.fresh_like(result, rows + (axis <= rows), tape.row_view(sources[0]).domain)
    for index, source in enumerate(sources):
        tape.row_op("copy", [tape.row_view(source)], out.without(axis, index))
    tape.bind(result, out)


@LOWERED.entry("repeat_interleave.self_int")
def _repeat_interleave(
    tape: Tape, result: Tensor, source: Tensor, repeats: int, axis: int | None = None, **kwargs: Any
) -> None:
    view = tape.row_view(source)
    if axis is None or axis % source.dim() == view.axis:
        raise NotLowerableError("rows are repeated")
    axis %= source.dim()
    out = tape.fresh_like(result, view.axis, view.domain)
    for place in range(repeats):
        tape.row_op("copy", [view], out.narrowed(axis, place, source.shape[axis], repeats))
    tape.bind(result, out)
