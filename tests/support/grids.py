"""Grids that repeat one thing: ``make test`` runs a slice of each, ``make test-rest`` and ``make test-all`` the rest.

What is left to the rest carries the marker ``grid``, which ``pytest`` deselects unless ``-m`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest


def grid(values: Mapping[str, Any] | Iterable[Any], keep: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """Return parameters for ``pytest.mark.parametrize``; those that ``keep`` does not name carry the marker.

    Args:
        values: the parameters, or a mapping from their ids.
        keep: which of them ``make test`` runs: a predicate, or some of them (of a mapping: some of its ids).

    """
    named = values if isinstance(values, Mapping) else None
    keeps = keep if callable(keep) else list(keep).__contains__
    found = []
    for name in named or values:
        value = name if named is None else named[name]
        arguments = value if isinstance(value, tuple) and named is None else (value,)
        marks = () if keeps(name) else (pytest.mark.grid,)
        found.append(pytest.param(*arguments, id=None if named is None else name, marks=marks))
    return found


def diagonal(**axes: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise by all combinations; ``make test`` runs as many as the longest axis, and every value at least once.

    Args:
        **axes: each argument's values, or a mapping from their ids.

    """
    named = [axis if isinstance(axis, Mapping) else {_id(value): value for value in axis} for axis in axes.values()]
    longest = max(map(len, named))
    kept = {tuple(i % len(axis) for axis in named) for i in range(longest)}
    found = []
    for places in product(*(range(len(axis)) for axis in named)):
        names = [list(axis)[place] for axis, place in zip(named, places, strict=True)]
        values = [axis[name] for axis, name in zip(named, names, strict=True)]
        marks = () if places in kept else (pytest.mark.grid,)
        found.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(axes), found)


def _id(value: Any) -> str:
    return str(value).removeprefix("torch.")
