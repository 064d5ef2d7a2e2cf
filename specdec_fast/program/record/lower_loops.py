"""The instructions for loops over the experts that rows have chosen; see ``expert_loops.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.program.plan.ir import RowOp
from specdec_fast.program.record import lower_choices, lower_complex, lower_sums, lower_tables, lower_views
from specdec_fast.program.record.expert_loops import ExpertLoop, OfLoop
from specdec_fast.program.record.lowering_table import Handler, Lowerings
from specdec_fast.program.record.row_views import NotLowerableError, RowView
from specdec_fast.program.record.tape import Tape

LOWERED = Lowerings()


@LOWERED.entry("one_hot.default")
def _one_hot(tape: Tape, result: Tensor, source: Tensor, num_classes: int = -1) -> None:
    """Lower the first operation of a loop; the experts are those that ``topk`` can have chosen."""
    view = tape.row_view(source)
    if (source.dim(), view.axis) != (2, 0) or num_classes < 1:
        raise NotLowerableError("one_hot of anything but the choices of every row")
    loop = ExpertLoop(tape, view, min(num_classes, _bound(tape, view)))
    tape.bind(result, OfLoop("one_hot", loop, ("rows", "choices", "experts")))


def _bound(tape: Tape, ids: RowView) -> int:
    writers = [step for step in tape.instructions if ids.buffer in step.writes]
    if len(writers) != 1 or not isinstance(writers[0], RowOp) or writers[0].code not in ("topk", "argmax"):
        raise NotLowerableError("one_hot of integers that are not the places of the largest numbers")
    return writers[0].inputs[0].length


def _permute(tape: Tape, result: Tensor, source: Tensor, order: Sequence[int], *, otherwise: Handler) -> None:
    value = tape.value(source)
    if isinstance(value, OfLoop):
        tape.bind(result, value.with_axes(tuple(value.axes[d] for d in order)))
    else:
        otherwise(tape, result, source, order)


def _sum(tape: Tape, result: Tensor, source: Tensor, axes: Any, *args: Any, otherwise: Handler, **kwargs: Any) -> None:
    value = tape.value(source)
    if not isinstance(value, OfLoop):
        otherwise(tape, result, source, axes, *args, **kwargs)
        return
    kept = [name for d, name in enumerate(value.axes) if d - source.dim() not in axes and d not in axes]
    if value.kind != "one_hot" or kept != ["experts"] or result.dim() != 1:
        raise NotLowerableError("a sum of choices that is no number of rows for each expert")
    tape.bind(result, OfLoop("counts", value.loop))


def _is_chosen(tape: Tape, result: Tensor, source: Tensor, number: Any, *, otherwise: Handler) -> None:
    value = tape.value(source)
    if not isinstance(value, OfLoop):
        otherwise(tape, result, source, number)
    elif (value.kind, number) == ("counts", 0):
        tape.bind(result, OfLoop("chosen", value.loop))
    else:
        raise NotLowerableError("choices of all rows are compared")


@LOWERED.entry("nonzero.default")
def _nonzero(tape: Tape, result: Tensor, source: Tensor) -> Tensor:
    value = tape.value(source)
    if not isinstance(value, OfLoop) or value.kind != "chosen":
        raise NotLowerableError("places of a number of entries that depends on the rows")
    return torch.arange(value.loop.num_experts, device=result.device)[:, None]


def _select(tape: Tape, result: Tensor, source: Tensor, axis: int, index: int, *, otherwise: Handler) -> None:
    value = tape.value(source)
    if not isinstance(value, OfLoop):
        otherwise(tape, result, source, axis, index)
    elif value.kind == "one_hot" and value.axes[axis] == "experts":
        axes = tuple(name for name in value.axes if name != "experts")
        tape.bind(result, OfLoop("mask", value.loop, axes, index))
    else:
        raise NotLowerableError("some choices of all rows are picked")


def _shaped(tape: Tape, result: Tensor, source: Tensor, *args: Any, otherwise: Handler, **kwargs: Any) -> Any:
    value = tape.value(source)
    if isinstance(value, OfLoop) and result.shape == source.shape:
        tape.bind(result, value)
        return result
    return otherwise(tape, result, source, *args, **kwargs)


@LOWERED.entry("where.default")
def _where(tape: Tape, result: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    """Begin the visit of an expert; return every row once, instead of the rows that have chosen it."""
    value = tape.value(mask)
    if not isinstance(value, OfLoop) or value.kind != "mask":
        raise NotLowerableError("places of a number of entries that depends on the rows")
    value.loop.begin(value.expert)
    every = torch.arange(value.loop.num_rows, device=mask.device)
    indices = {"rows": every, "choices": torch.zeros_like(every)}
    for name, places in indices.items():
        tape.bind(places, OfLoop(name, value.loop, (), value.expert))
    return [indices[name] for name in value.axes]


def _index(tape: Tape, result: Tensor, source: Tensor, indices: Sequence[Any], *, otherwise: Handler) -> None:
    """Lower the rows of an expert, ``source[rows]``, and their numbers of the choice, ``source[rows, choices]``."""
    values = [tape.value(index) for index in indices]
    kinds = [each.kind if isinstance(each, OfLoop) else "" for each in values]
    if kinds not in (["rows"], ["rows", "choices"]):
        otherwise(tape, result, source, indices)
        return
    assert isinstance(values[0], OfLoop)
    loop = values[0].loop
    view = tape.row_view(source)
    loop.expect_visit(values[0].expert)
    if (view.axis, view.domain) != (0, loop.ids.domain):
        raise NotLowerableError("rows of an expert that are not the first axis")
    if kinds == ["rows"]:
        tape.bind(result, view)
        return
    if source.shape[1] != loop.num_choices:
        raise NotLowerableError("numbers of a choice among others")
    out = tape.fresh_like(result, 0, view.domain)
    loop.of_choices(view, out)
    tape.bind(result, out)


@LOWERED.entry("index_add.default")
def _index_add(
    tape: Tape, result: Tensor, target: Tensor, axis: int, index: Tensor, states: Tensor, **kwargs: Any
) -> None:
    value = tape.value(index)
    before = tape.value(target)
    if not isinstance(value, OfLoop) or value.kind != "rows" or axis % target.dim() or kwargs:
        raise NotLowerableError("rows are added to others")
    value.loop.expect_visit(value.expert)
    sums = before.target if isinstance(before, OfLoop) and before.loop is value.loop else tape.row_view(target)
    added = tape.row_view(states)
    if sums is None or (sums.axis, added.axis, added.sizes) != (0, 0, sums.sizes):
        raise NotLowerableError("states of experts in another shape than their sum")
    is_last = value.loop.end(added)
    tape.bind(result, value.loop.added_to(sums) if is_last else OfLoop("sums", value.loop, target=sums))


_TABLES = (lower_views, lower_sums, lower_tables, lower_choices, lower_complex)
_EARLIER = {name: handler for table in _TABLES for name, handler in table.LOWERED.items()}
for _handler, *_names in (
    (_permute, "permute.default"),
    (_sum, "sum.dim_IntList"),
    (_is_chosen, "gt.Scalar"),
    (_select, "select.int"),
    (_shaped, "squeeze.dim", "squeeze.default", "view.default", "reshape.default"),
    (_index, "index.Tensor"),
):
    LOWERED |= {name: partial(_handler, otherwise=_EARLIER[name]) for name in _names}
