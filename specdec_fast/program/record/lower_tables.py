"""The instructions for operations that look numbers up: rows of a table, numbers of a vector, rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import ROWS, Operand, RowOp
from specdec_fast.program.record.lower_sums import vectors_of
from specdec_fast.program.record.lowering_table import Lowerings
from specdec_fast.program.record.operands import LARGEST_WHOLE, WHOLE, kept
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape
from specdec_fast.program.record.tape_values import Index

LOWERED = Lowerings()


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
    """Lower ``source[indices]``, such as a factor of every chosen expert, or one number for each row."""
    value = tape.value(indices)
    if isinstance(value, Index) or (isinstance(value, RowView) and value.size == 1 and indices.dtype != torch.bool):
        tape.bind(result, _rows_of_table(tape, source.reshape(-1, 1), indices).without(-1, 0))
        return
    view = tape.row_view(indices)
    if indices.dtype == torch.bool or view.axis == indices.dim() - 1:
        raise NotLowerableError("a vector is read at places that are not the last axis of a row")
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("gather", [source, view], out)
    tape.bind(result, out)


@LOWERED.entry("gather.default")
def gather(tape: Tape, result: Tensor, source: Tensor, axis: int, index: Tensor, **kwargs: Any) -> None:
    """Lower the numbers of vectors at computed places, or those of one constant vector at an integer of each row."""
    if tape.value(source) is None and source.numel() == source.shape[axis] and index.numel() == index.shape[axis]:
        _numbers_of_vector(tape, result, source.reshape(-1), index)
        return
    view = vectors_of(tape, "gather", source, axis)
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("gather", [view, tape.row_view(index)], out)
    tape.bind(result, out)


@LOWERED.entry("index_select.default")
def _numbers_in_order(tape: Tape, result: Tensor, source: Tensor, axis: int, places: Tensor) -> None:
    """Lower another order of a row's numbers, such as inputs sorted by the group of their weights."""
    if tape.value(places) is not None:
        raise NotLowerableError("numbers are picked at places that are no constant")
    view = vectors_of(tape, "index_select", source, axis)
    out = tape.fresh_like(result, view.axis, view.domain)
    tape.row_op("gather", [view, _as_floats(places)], out)
    tape.bind(result, out)


@LOWERED.entry("embedding.default")
def _embedding(tape: Tape, result: Tensor, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> None:
    """Lower the choice of a row of a table: by token id, by position, or by an integer computed for every row."""
    tape.bind(result, _rows_of_table(tape, table, indices))


@LOWERED.entry("embedding_part.default")
def _embedding_part(tape: Tape, result: Tensor, indices: Tensor, table: Tensor, first: int) -> None:
    """Lower the rows of a part of the vocabulary; a row is zeros if the table has not got its token."""
    if tape.value(indices) != Index("token_ids") or tape.value(table) is not None or not table.is_contiguous():
        raise NotLowerableError("a part of an embedding by anything but token ids, or by a table that is not plain")
    out = tape.fresh_like(result, tape.index_axis(indices), ROWS)
    width = table.shape[1]
    places = Operand(kept(table), table.dtype, 0, (1,), width), Operand(out.buffer, out.dtype, 0, (1,), width)
    tape.instructions.append(RowOp("embedding_part", (width,), (places[0],), places[1], scalar=float(first)))
    tape.bind(result, out)


def _rows_of_table(tape: Tape, table: Tensor, indices: Tensor) -> RowView:
    """Record the choice of a row of ``table`` ``[n, width]`` for each row; return it as ``[*indices.shape, width]``."""
    value = tape.value(indices)
    if tape.value(table) is not None or table.dim() != 2 or not table.is_contiguous():
        raise NotLowerableError("an embedding by a table that is not plain")
    table = _as_floats(table)
    computed: tuple[Operand, ...] = ()
    axis = 0
    width = table.shape[1]
    added = 0
    if isinstance(value, Index) and (value.kind, value.added != 0) != ("token_ids", True):
        axis = tape.index_axis(indices)
        added = value.added
        if value.kind == "logit_rows":
            raise NotLowerableError("an embedding by the rows whose logits are wanted")
    else:
        view = tape.numbers(indices)
        if view.size != 1 or view.domain != ROWS or indices.dtype == torch.bool or len(table) > LARGEST_WHOLE:
            raise NotLowerableError("an embedding by anything but one integer for each row")
        axis = view.axis
        computed = (Operand(view.buffer, view.dtype, view.offset, (0,), 1),)
    out = tape.fresh(ROWS, axis, (*[1] * indices.dim(), width), table.dtype)
    places = Operand(kept(table), table.dtype, 0, (1,), width), Operand(out.buffer, out.dtype, 0, (1,), width)
    by_position = not computed and value == Index("positions", added)
    tape.instructions.append(
        RowOp("embedding", (width,), (places[0], *computed), places[1], scalar=float(added), by_position=by_position)
    )
    return out.expanded(axis, (*[1 if d == axis else size for d, size in enumerate(indices.shape)], width))


def _as_floats(constant: Tensor) -> Tensor:
    if constant.dtype not in WHOLE:
        return constant
    if constant.numel() and int(constant.abs().max() if constant.dtype != torch.bool else 1) > LARGEST_WHOLE:
        raise NotLowerableError(f"integers beyond {LARGEST_WHOLE}")
    return constant.float()
