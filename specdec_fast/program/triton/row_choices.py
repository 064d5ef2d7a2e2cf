"""Triton code for the operations by which routers choose experts: topk, gather and scatter.

Indices are whole numbers in fp32, as everywhere in a program. A number at an index is found by comparing the index with
every place of a vector, so nothing has to be in memory; vectors are as long as a model has experts.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec_fast.program.plan.ir import RowOp
from specdec_fast.program.triton.row_code import Expression, RowCode
from specdec_fast.program.triton.row_index import Axis, Place, of_axis

_CHOSEN = -(2**31)  # below the order of every number


def _topk(code: RowCode, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
    """Choose the largest number, then the largest of the others; of equal ones the first."""
    numbers, wide, axis = code.vector(number, step.inputs[0], at[:-1], own_axis=True)
    if axis.size == 1:
        return code.line("tl.full([], 0.0, tl.float32)")
    kept = tuple(each for each in wide if each is not axis)
    along = code.axis(axis, wide)
    places = []
    order = f"order_of({code.aligned(numbers, wide)})"
    mask = code.mask((axis,))
    left = code.line(f"tl.where({along} < {axis.size}, {order}, {_CHOSEN})" if mask else order, wide)
    for _ in range(step.out.length):
        best = code.over(axis, "max", left, wide)
        is_best = f"{left.text} == {code.aligned(best, wide)}"
        first = f"tl.min(tl.where({is_best}, {along}, {axis.size}), axis={wide.index(axis)})"
        places.append(code.line(first, kept))
        is_chosen = f"{along} == {code.aligned(places[-1], wide)}"
        left = code.line(f"tl.where({is_chosen}, {_CHOSEN}, {left.text})", wide)
    which = code.index(at[-1])
    if not which.axes:
        chosen = places[at[-1].constant]
    else:
        chosen = places[-1]
        for i, place in reversed(list(enumerate(places[:-1]))):
            chosen = code.combined(f"tl.where(({{0}}) == {i}, {{1}}, {{2}})", [which, place, chosen])
    return code.line(f"{chosen.text}.to(tl.float32)", chosen.axes)


def _gather(code: RowCode, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
    """Add up the numbers of a vector at the index, which is one, and zeros."""
    source, index = step.inputs
    numbers, _, axis = code.vector(number, source, at[:-1], own_axis=True)
    if axis.size == 1:
        return numbers
    wanted = code.at(index, at, number)
    along = _numbers(code, of_axis(axis))
    picked = code.combined("tl.where({0} == {1}, {2}, 0.0)", [along, wanted, numbers])
    return code.over(axis, "sum", picked, picked.axes)


def _scatter(code: RowCode, number: int, step: RowOp, at: tuple[Place, ...]) -> Expression:
    """Take what is written to a place, if some index names it; indices differ."""
    source, index, written = step.inputs
    wanted, _, axis = code.vector(number, index, at[:-1], own_axis=True)
    place = _numbers(code, at[-1])
    hits = code.combined("tl.where({0} == {1}, 1.0, 0.0)", [wanted, place])
    is_hit = _over(code, axis, "max", hits)
    before = code.at(source, at, number)
    new = code.at(written, (*at[:-1], of_axis(axis)), number)
    if axis in new.axes:
        new = _over(code, axis, "sum", code.combined("tl.where({0} == {1}, {2}, 0.0)", [wanted, place, new]))
    return code.combined("tl.where({0} != 0.0, {1}, {2})", [is_hit, new, before])


def _over(code: RowCode, axis: Axis, how: str, value: Expression) -> Expression:
    return code.over(axis, how, value, value.axes) if axis in value.axes else value


def _numbers(code: RowCode, place: Place) -> Expression:
    index = code.index(place)
    return code.line(
        f"({index.text}).to(tl.float32)" if index.axes else f"tl.full([], {index.text}, tl.float32)", index.axes
    )


CHOICES: dict[str, Callable[[RowCode, int, RowOp, tuple[Place, ...]], Expression]] = {
    "topk": _topk,
    "argmax": _topk,  # of one
    "gather": _gather,
    "scatter": _scatter,
}
