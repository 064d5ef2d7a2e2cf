"""Static trees: fitted greedily, checked, and cut to limits."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest

import specdec_fast as sd
from specdec_fast.trees.static import (
    StaticTree,
    chain,
    checked_choices,
    fit_tree,
)

RATES = [(0.6, 0.2, 0.05), (0.5, 0.3, 0.0), (0.4, 0.1, 0.1)]


def closed(choices):
    return all(len(path) == 1 or path[:-1] in choices for path in choices)


def expected_accepted(choices):
    """The expected number of accepted tokens of a tree, if the depths hit independently."""
    return sum(math.prod(RATES[depth][rank] for depth, rank in enumerate(path)) for path in choices)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_the_fitted_tree_is_the_best_of_all(num_nodes):
    paths = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    trees = (set(tree) for tree in combinations(paths, num_nodes))
    best = max(expected_accepted(tree) for tree in trees if closed(tree))
    fitted = fit_tree(RATES, num_nodes)
    assert len(fitted) == num_nodes
    assert closed(set(fitted))
    assert expected_accepted(fitted) == pytest.approx(best)


def test_a_fit_by_hand():
    assert fit_tree(RATES, 5) == [(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]
    assert fit_tree([(0.5, 0.0), (0.0, 0.0)], 9) == [(0,)], "rate 0 is not worth a row"


def test_trees_are_cut_to_limits_depth_first():
    tree = StaticTree(fit_tree(RATES, 5))
    assert tree.num_ranks == [2, 2, 1]
    assert tree.within(9, 9) == ([0, 1, 2, 1, 0], [0, 0, 0, 1, 1], [-1, 0, 1, 0, -1])
    assert tree.within(2, 9) == ([0, 1, 1, 0], [0, 0, 1, 1], [-1, 0, 0, -1])
    assert tree.within(9, 3) == ([0, 1, 0], [0, 0, 1], [-1, 0, -1]), "the likeliest nodes stay"
    assert tree.within(1, 9) == ([0, 0], [0, 1], [-1, -1])
    assert StaticTree(chain(3)).within(9, 9) == ([0, 1, 2], [0, 0, 0], [-1, 0, 1])
    assert StaticTree([(0, 1), (0,)]).within(9, 1).parents == [-1], "parents come first, whatever the order"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tree", "expected a list of rank paths"),
        ([[0], [-1]], "expected a list of rank paths"),
        ([[0], []], "expected a list of rank paths"),
        ([[True]], "expected a list of rank paths"),
        ([], "0 nodes"),
        ([[0], [0]], "2 nodes, 1 of them different"),
        ([[rank] for rank in range(65)], "65 nodes"),
        ([[0], [1, 0]], r"the node \[1, 0\] without its parent \[1\]"),
    ],
)
def test_broken_trees_are_refused(value, message):
    with pytest.raises(sd.ConfigError, match=f"^draft_tree .*{message}"):
        sd.EngineConfig(draft_tree=value)
    assert checked_choices([[0], [0, 1]], "it") == ((0,), (0, 1))
    assert sd.EngineConfig(draft_tree="chain").draft_tree == "chain"


def test_a_tree_may_be_a_number_of_nodes():
    assert [sd.EngineConfig(draft_tree=number).draft_tree for number in (1, 64)] == [1, 64]
    for number in (0, 65, True):
        with pytest.raises(sd.ConfigError, match=r"^draft_tree"):
            sd.EngineConfig(draft_tree=number)
