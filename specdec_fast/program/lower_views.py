"""The instructions for operations that view numbers in another shape, concatenate them or look them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.ir import ROWS, Operand, RowOp
from specdec_fast.program.lowering_table import Lowerings
from specdec_fast.program.operands import LARGEST_WHOLE, WHOLE, kept
from specdec_fast.program.row_views import NotLowerableError
from specdec_fast.program.tape import Tape
from specdec_fast.program.tape_values import Index, only_axis

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
def _view(tape: Tape, result: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
    value = tape.value(source)
    if isinstance(value, Index):
        only_axis(result)
        tape.bind(result, value)
    else:
        tape.bind(result, tape.reshaped(tape.row_view(source), tuple(result.shape)))


@LOWERED.entry("permute.default")
def _permute(tape: Tape, result: Tensor, source: Tensor, order: Sequence[int]) -> None:
    tape.bind(result, tape.row_view(source).permuted(order))


@LOWERED.entry("transpose.int", "swapaxes.default", "swapdims.default")
def _transpose(tape: Tape, result: Tensor, source: Tensor, first: int, second: int) -> None:
    order = list(range(source.dim()))
    order[first], order[second] = order[second], order[first]
    tape.bind(result, tape.row_view(source).permuted(order))


@LOWERED.entry("t.default")
def _t(tape: Tape, result: Tensor, source: Tensor) -> None:
    _transpose(tape, result, source, 0, source.dim() - 1)


@LOWERED.entry("expand.default")
def _expand(tape: Tape, result: Tensor, source: Tensor, sizes: Sequence[int], **kwargs: Any) -> None:
    value = tape.value(source)
    if isinstance(value, Index):
        _view(tape, result, source)
        return
    view = tape.row_view(source)
    axis = view.axis + result.dim() - source.dim()
    tape.bind(result, view.expanded(axis, tuple(1 if d == axis else size for d, size in enumerate(result.shape))))


@LOWERED.entry("select.int")
def _select(tape: Tape, result: Tensor, source: Tensor, axis: int, index: int) -> None:
    value = tape.value(source)
    if isinstance(value, Index) and source.shape[axis] == 1:
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
    if result.shape == source.shape:
        _alias(tape, result, source)
        return
    view = tape.row_view(source)
    if axis % source.dim() == view.axis:
        raise NotLowerableError("rows are cut out of the batch")
    first, _, _ = slice(start, end, step).indices(source.shape[axis])
    tape.bind(result, view.narrowed(axis, first, result.shape[axis], step))


@LOWERED.entry("split.Tensor", "split_with_sizes.default", "chunk.default")
def _split(tape: Tape, result: Sequence[Tensor], source: Tensor, how: Any, axis: int = 0) -> None:
    view, start = tape.row_view(source), 0
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
    view, start = tape.row_view(sources[0]), 0
    if axis % result.dim() == view.axis:
        raise NotLowerableError("rows are appended to the batch")
    out = tape.fresh_like(result, view.axis, view.domain)
    for source in sources:
        size = source.shape[axis]
        tape.row_op("copy", [tape.row_view(source)], out.narrowed(axis, start, size))
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
    view = tape.writable(target)
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


@LOWERED.entry("index.Tensor")
def _index(tape: Tape, result: Tensor, source: Tensor, indices: Sequence[Tensor | None]) -> None:
    if tape.value(source) is None and len(indices) == 1 and isinstance(indices[0], Tensor):
        look_up = _numbers_of_vector if source.dim() == 1 else _embedding
        look_up(tape, result, source, indices[0])
        return
    view = tape.row_view(source)
    chosen = [(d, index) for d, index in enumerate(indices) if index is not None]
    value = tape.value(chosen[0][1]) if len(chosen) == 1 and chosen[0][0] == view.axis else None
    if not isinstance(value, Index) or value != Index("logit_rows"):
        raise NotLowerableError("rows are picked by indices of the model's own")
    tape.gather(view, result)


def _numbers_of_vector(tape: Tape, result: Tensor, source: Tensor, indices: Tensor) -> None:
    """Lower ``source[indices]``, such as a factor of every chosen expert."""
    view = tape.row_view(indices)
    if indices.dtype == torch.bool or view.axis == indices.dim() - 1:
        raise NotLowerableError("a vector is read at places that are not the last axis of a row")
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("gather", [source, view], out)
    tape.bind(result, out)


@LOWERED.entry("embedding.default")
def _embedding(tape: Tape, result: Tensor, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> None:
    """Lower the choice of a row of a table: by token id, by position, or by an integer computed for every row."""
    value = tape.value(indices)
    if tape.value(table) is not None or table.dim() != 2 or not table.is_contiguous():
        raise NotLowerableError("an embedding by a table that is not plain")
    computed: tuple[Operand, ...] = ()
    axis, width, added = 0, table.shape[1], 0
    if isinstance(value, Index) and (value.kind, value.added != 0) != ("token_ids", True):
        axis, added = only_axis(indices), value.added
        if value.kind == "logit_rows":
            raise NotLowerableError("an embedding by the rows whose logits are wanted")
    else:
        view = tape.numbers(indices)
        if view.size != 1 or view.domain != ROWS or indices.dtype == torch.bool or len(table) > LARGEST_WHOLE:
            raise NotLowerableError("an embedding by anything but one integer for each row")
        axis, computed = view.axis, (Operand(view.buffer, view.dtype, view.offset, (0,), 1),)
    out = tape.fresh_like(result, axis, ROWS)
    places = Operand(kept(table), table.dtype, 0, (1,), width), Operand(out.buffer, out.dtype, 0, (1,), width)
    by_position = not computed and value == Index("positions", added)
    tape.instructions.append(
        RowOp("embedding", (width,), (places[0], *computed), places[1], scalar=float(added), by_position=by_position)
    )
    tape.bind(result, out)
