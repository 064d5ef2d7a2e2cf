"""Grids that repeat one thing: ``make test`` runs a slice of each, ``make test-rest`` and ``make test-all`` the rest.

What is left to the rest carries the marker ``grid``, which ``pytest`` deselects unless ``-m`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
import torch


def grid(values: Mapping[str, Any] | Iterable[Any], keep: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """Return parameters for ``pytest.mark.parametrize``; those that ``keep`` does not name carry the marker.

    Args:
        values: the parameters, or a mapping from their ids.
        keep: which of them ``make test`` runs: a predicate, or some of them (of a mapping: some of its ids).

    """
    named = values if isinstance(values, Mapping) else None
    keeps = keep if callable(keep) else list(keep).__contains__
    parameters = []
    for name in named or values:
        value = name if named is None else named[name]
        arguments = value if isinstance(value, tuple) and named is None else (value,)
        marks = () if keeps(name) else (pytest.mark.grid,)
        parameters.append(pytest.param(*arguments, id=None if named is None else name, marks=marks))
    return parameters


# ``make test`` runs so many combinations of a test's parameters, and of its fixtures', that every value occurs. With
# arguments, ``each_value_once("first", "second")``, every combination of these two occurs.
each_value_once = pytest.mark.each_value_once


def combinations(**axes: Mapping[str, Any] | Iterable[Any]) -> Callable[[Any], Any]:
    """Parametrise a test by all combinations, with ``each_value_once``.

    Args:
        **axes: each argument's values, or a mapping from their ids.

    """
    named = [axis if isinstance(axis, Mapping) else {_id(value): value for value in axis} for axis in axes.values()]
    parameters = [
        pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen))
        for chosen in product(*(axis.items() for axis in named))
    ]
    parametrize = pytest.mark.parametrize(tuple(axes), parameters)
    return lambda test: each_value_once(parametrize(test))


def mark_what_is_covered(items: list[Any]) -> None:
    """Give the marker ``grid`` to items of tests with ``each_value_once`` whose values all occur in other items."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("each_value_once") and not item.get_closest_marker("grid"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for items_of_test in tests.values():
        left = {item: _values(item) for item in items_of_test}
        missing = set().union(*left.values())
        while missing:
            chosen = max(left, key=lambda item: len(missing & left[item]))
            missing -= left.pop(chosen)
        for item in left:
            item.add_marker(pytest.mark.grid)


def _values(item: Any) -> set[tuple[str, str]]:
    """Return the parameters of an item with their values; those without a name of their own by their identity."""
    together = item.get_closest_marker("each_value_once").args
    named = {
        name: repr(value) if isinstance(value, _PLAIN) else str(id(value))
        for name, value in item.callspec.params.items()
    }
    assert named.keys() >= set(together), f"{item.nodeid} has no parameters {together}"
    combination = {(" ".join(together), " ".join(named.pop(name) for name in together))} if together else set()
    return combination | set(named.items())


_PLAIN = (str, int, float, type(None), torch.dtype, BaseException)


def _id(value: Any) -> str:
    return str(value).removeprefix("torch.")
