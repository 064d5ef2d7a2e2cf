"""Coordinates of what is read among what was written, against all numbers one by one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.program.triton.row_index import Axis, CutError, Place, SplitError, located, of_axis, place_of


def values(place: Place, numbers: dict[Axis, int]) -> int:
    return place.constant + sum(factor * numbers[axis] for axis, factor in place.terms)


def everywhere(places: tuple[Place, ...]):
    """Yield the value of each place for all values of the axes."""
    axes = sorted({axis for place in places for axis in place.axes}, key=lambda axis: axis.number)
    for numbers in product(*(range(axis.size) for axis in axes)):
        named = dict(zip(axes, numbers, strict=True))
        yield tuple(values(place, named) for place in places)


def read(place: Place, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the coordinates of each number that was written, after as many splits and cuts as are needed."""
    waiting, found = [place], {}
    for _ in range(10_000):
        if not waiting:
            return found
        each = waiting.pop()
        try:
            coordinates = located(each, offset, shape, strides)
        except (SplitError, CutError) as error:
            waiting += [each.replaced(error.axis, part) for part in error.parts()]
            continue
        if coordinates is not None:
            found |= {at: own for at, *own in everywhere((each, *coordinates))}
    raise AssertionError("splits and cuts do not end")


@st.composite
def layouts(draw):
    """Shape and strides without overlaps: axes in any order, with gaps."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for d in draw(st.permutations(range(len(shape)))):
        strides[d] = step
        step *= shape[d] + draw(st.integers(0, 2))
    return tuple(shape), tuple(strides)


@given(layouts(), layouts(), st.integers(0, 12), st.integers(0, 12))
def test_every_number_is_found_where_it_was_written(reader, writer, read_offset, written_offset):
    place = place_of(read_offset, reader[1], [of_axis(Axis(size)) for size in reader[0]])
    written = {
        written_offset + sum(map(int.__mul__, at, writer[1])): list(at) for at in product(*map(range, writer[0]))
    }
    wanted = {at for (at,) in everywhere((place,))}
    assert read(place, written_offset, *writer) == {at: own for at, own in written.items() if at in wanted}


def test_halves_of_heads_are_cut_once():
    """The rotation of rotary embeddings: two writers, each of half a head."""
    row, found = of_axis(Axis(64)), []
    with pytest.raises(SplitError) as split:
        located(row, 8, (4, 8), (16, 1))
    (heads,) = split.value.parts()
    with pytest.raises(CutError) as cut:
        located(heads, 8, (4, 8), (16, 1))
    low, high = (heads.replaced(cut.value.axis, part) for part in cut.value.parts())
    assert located(low, 8, (4, 8), (16, 1)) is None
    found = located(high, 8, (4, 8), (16, 1))
    assert found is not None
    assert [place.constant for place in found] == [0, 0]
    assert low.axes == high.axes, "both halves share their axes, so values are computed once"
