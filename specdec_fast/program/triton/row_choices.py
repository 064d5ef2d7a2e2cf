"""Triton code for the operations by which routers choose experts: topk, gather and scatter.

Indices are whole numbers in fp32, as everywhere in a program. A number at an index is found by comparing the index with
every place of a vector, so nothing has to be in memory; vectors are as long as a model has experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec_fast.program.plan.ir import RowOp
from specdec_fast.program.triton.row_index import Axis, Place, of_axis

if TYPE_CHECKING:
    from specdec_fast.program.triton.row_values import Value, Values

_CHOSEN = -(2**31)  # below the order of every number


def _topk(values: Values, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
    """Choose the largest number, then the largest of the others; of equal ones the first."""
    numbers, wide, axis = values.vector(number, step.inputs[0], at[:-1], own_axis=True)
    if axis.size == 1:
        return values.line("tl.full([], 0.0, tl.float32)")
    kept = tuple(each for each in wide if each is not axis)
    along, places = values.axis(axis, wide), []
    order = f"order_of({values.aligned(numbers, wide)})"
    mask = values.mask((axis,))
    left = values.line(f"tl.where({along} < {axis.size}, {order}, {_CHOSEN})" if mask else order, wide)
    for _ in range(step.out.length):
        best = values.over(axis, "max", left, wide)
        is_best = f"{left.text} == {values.aligned(best, wide)}"
        first = f"tl.min(tl.where({is_best}, {along}, {axis.size}), axis={wide.index(axis)})"
        places.append(values.line(first, kept))
        is_chosen = f"{along} == {values.aligned(places[-1], wide)}"
        left = values.line(f"tl.where({is_chosen}, {_CHOSEN}, {left.text})", wide)
    which = values.index(at[-1])
    if not which.axes:
        found = places[at[-1].constant]
    else:
        found = places[-1]
        for i, place in reversed(list(enumerate(places[:-1]))):
            found = values.combined(f"tl.where(({{0}}) == {i}, {{1}}, {{2}})", [which, place, found])
    return values.line(f"{found.text}.to(tl.float32)", found.axes)


def _gather(values: Values, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
    """Add up the numbers of a vector at the index, which is one, and zeros."""
    source, index = step.inputs
    numbers, _, axis = values.vector(number, source, at[:-1], own_axis=True)
    if axis.size == 1:
        return numbers
    wanted, along = values.at(index, at, number), _numbers(values, of_axis(axis))
    picked = values.combined("tl.where({0} == {1}, {2}, 0.0)", [along, wanted, numbers])
    return values.over(axis, "sum", picked, picked.axes)


def _scatter(values: Values, number: int, step: RowOp, at: tuple[Place, ...]) -> Value:
    """Take what is written to a place, if some index names it; indices differ."""
    source, index, written = step.inputs
    wanted, _, axis = values.vector(number, index, at[:-1], own_axis=True)
    place = _numbers(values, at[-1])
    hits = values.combined("tl.where({0} == {1}, 1.0, 0.0)", [wanted, place])
    is_hit = _over(values, axis, "max", hits)
    before = values.at(source, at, number)
    own = values.at(written, (*at[:-1], of_axis(axis)), number)
    new = own
    if axis in own.axes:
        new = _over(values, axis, "sum", values.combined("tl.where({0} == {1}, {2}, 0.0)", [wanted, place, own]))
    return values.combined("tl.where({0} != 0.0, {1}, {2})", [is_hit, new, before])


def _over(values: Values, axis: Axis, how: str, value: Value) -> Value:
    return values.over(axis, how, value, value.axes) if axis in value.axes else value


def _numbers(values: Values, place: Place) -> Value:
    index = values.index(place)
    return values.line(
        f"({index.text}).to(tl.float32)" if index.axes else f"tl.full([], {index.text}, tl.float32)", index.axes
    )


CHOICES: dict[str, Callable[[Values, int, RowOp, tuple[Place, ...]], Value]] = {
    "topk": _topk,
    "argmax": _topk,  # of one
    "gather": _gather,
    "scatter": _scatter,
}
