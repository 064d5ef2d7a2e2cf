"""What ``each_value_once`` leaves to ``make test`` of a test of all combinations."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from support.grids import each_value_once, mark_what_is_covered

AXES = {"method": ["a", "b"], "size": [1, 2, 3], "function": [print, len]}


class Item:
    """A combination, as far as the choice looks at it."""

    def __init__(self, params, together):
        self.nodeid, self.marks = f"test_x[{params}]", [each_value_once(*together).mark]
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, marker):
        self.marks.append(marker.mark)


def kept(*together):
    items = [Item(dict(zip(AXES, values, strict=True)), together) for values in product(*AXES.values())]
    mark_what_is_covered(items)
    return [item.callspec.params for item in items if item.get_closest_marker("grid") is None]


def test_every_value_occurs_in_as_few_combinations_as_the_longest_axis_has():
    found = kept()
    assert len(found) == 3
    assert all({params[name] for params in found} == set(values) for name, values in AXES.items())


def test_every_combination_of_named_parameters_occurs():
    found = kept("method", "size")
    assert sorted((params["method"], params["size"]) for params in found) == list(product("ab", (1, 2, 3)))
    assert {params["function"] for params in found} == {print, len}


def test_parameters_that_the_test_does_not_have_are_refused():
    with pytest.raises(AssertionError, match="has no parameters"):
        kept("dtype")
