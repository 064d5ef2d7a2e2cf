"""Places within a row as sums over axes, and the inverse question.

Given a place that is read, find which result of an earlier operation was written there. An operation writes its result
to ``offset + sum(coordinate * stride)``, and a later one reads it by other axes, as views allow. ``located`` returns
the writer's coordinates of what is read. Where they do not depend on the reader's axes in one way, it asks for an axis
to be split in two, or to be cut into two parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

_NUMBERS = count()


@dataclass(frozen=True, eq=False)
class Axis:
    """A variable from 0 to ``size - 1``; ``number`` orders the axes of a tensor."""

    size: int
    number: int = field(default_factory=lambda: next(_NUMBERS))


def padded(axis: Axis) -> int:
    """Return the size of an axis in a tensor, a power of two."""
    return 1 << (axis.size - 1).bit_length()


class SplitError(Exception):
    """An axis must become ``inner`` numbers within ``size / inner``."""

    def __init__(self, axis: Axis, inner: int) -> None:
        super().__init__()
        self.axis = axis
        self.inner = inner

    def parts(self) -> list[Place]:
        """Return what takes the place of the axis."""
        outer = of_axis(Axis(self.axis.size // self.inner))
        return [outer.times(self.inner).plus(of_axis(Axis(self.inner)))]


class CutError(Exception):
    """An axis must become two: the numbers below ``at``, and the others."""

    def __init__(self, axis: Axis, at: int) -> None:
        super().__init__()
        self.axis = axis
        self.at = at

    def parts(self) -> list[Place]:
        """Return what takes the place of the axis in each of two copies; parts of one size share their axis."""
        first = of_axis(Axis(self.at))
        rest = self.axis.size - self.at
        second = first if rest == self.at else of_axis(Axis(rest))
        return [first, second.plus(self.at)]


@dataclass(frozen=True)
class Place:
    """``constant + sum(coefficient * axis)``, with axes by number and positive coefficients."""

    constant: int = 0
    terms: tuple[tuple[Axis, int], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes on which it depends."""
        return tuple(axis for axis, _ in self.terms)

    @property
    def largest(self) -> int:
        """The largest value; ``constant`` is the smallest one."""
        return self.constant + sum((axis.size - 1) * factor for axis, factor in self.terms)

    def plus(self, other: Place | int) -> Place:
        """Return the sum."""
        if isinstance(other, int):
            return Place(self.constant + other, self.terms)
        factors = dict(self.terms)
        for axis, factor in other.terms:
            factors[axis] = factors.get(axis, 0) + factor
        return Place(self.constant + other.constant, _ordered(factors))

    def times(self, factor: int) -> Place:
        """Return the product with a number that is not negative."""
        return Place(self.constant * factor, _ordered({axis: coefficient * factor for axis, coefficient in self.terms}))

    def replaced(self, axis: Axis, by: Place) -> Place:
        """Return it with ``by`` in the place of an axis."""
        factors = dict(self.terms)
        factor = factors.pop(axis, 0)
        return Place(self.constant, _ordered(factors)).plus(by.times(factor)) if factor else self


def of_axis(axis: Axis) -> Place:
    """Return the place that is an axis; 0 for an axis of one number."""
    return Place(0, ((axis, 1),)) if axis.size > 1 else Place()


def _ordered(factors: Mapping[Axis, int]) -> tuple[tuple[Axis, int], ...]:
    return tuple(sorted(((a, f) for a, f in factors.items() if f), key=lambda term: term[0].number))


def place_of(offset: int, strides: Sequence[int], coordinates: Sequence[Place]) -> Place:
    """Return ``offset + sum(coordinate * stride)``."""
    place = Place(offset)
    for stride, coordinate in zip(strides, coordinates, strict=True):
        place = place.plus(coordinate.times(stride))
    return place


def located(place: Place, offset: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[Place, ...] | None:
    """Return the coordinates of the numbers at ``place`` among those at ``offset + sum(coordinate * stride)``.

    There is one per axis of ``shape``; None if none of the numbers is among these. Raises SplitError or CutError if
    some are, or if the coordinates are no sums over the axes.
    """
    if 0 in shape:
        return None
    rest = place.plus(-offset)
    coordinates = [Place()] * len(shape)
    for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[d] == 1:
            continue
        coordinates[d], rest = _divided(rest, strides[d])
    inside = [(each, size) for each, size in zip(coordinates, shape, strict=True) if size > 1] + [(rest, 1)]
    if any(each.largest < 0 or each.constant >= size for each, size in inside):
        return None
    for each, size in inside:
        _expect_below(each, 0)
        _expect_below(each, size)
    return tuple(coordinates)


def _divided(place: Place, by: int) -> tuple[Place, Place]:
    whole = Place(0, tuple((axis, factor // by) for axis, factor in place.terms if factor % by == 0))
    rest = Place(place.constant, tuple((axis, factor) for axis, factor in place.terms if factor % by))
    quotient = rest.constant // by  # of the smallest value
    rest = rest.plus(-quotient * by)
    if rest.largest >= by:
        axis, factor = _steepest(rest)
        inner = by // factor if by % factor == 0 else 0
        if inner and axis.size > inner and axis.size % inner == 0:
            raise SplitError(axis, inner)
        _expect_below(rest, by)
    return whole.plus(quotient), rest


def _expect_below(place: Place, bound: int) -> None:
    if place.constant < bound <= place.largest:
        axis, factor = _steepest(place)
        raise CutError(axis, max(1, min(axis.size - 1, -((place.constant - bound) // factor))))


def _steepest(place: Place) -> tuple[Axis, int]:
    return max(place.terms, key=lambda term: term[1])
