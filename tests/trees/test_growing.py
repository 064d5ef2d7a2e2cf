"""Trees while they are drafted: the best nodes of all candidates, in an order that moves few entries."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_fast.drafters.draft import draft_of_trees
from specdec_fast.trees.growing import GrowingTree, TreeNodes, merged
from specdec_fast.trees.parents import ROOT, depths_of
from specdec_fast.trees.static import StaticTree, fit_tree
from support.trees import beginnings_of, is_depth_first, paths_of

RANKS = 4


def children_of(path, seed):
    """Names and log-probabilities of the children of a path; a seed decides. Some are equal, some impossible."""
    rng = random.Random(f"{seed} {path}")
    tokens = rng.sample(range(50), RANKS)
    return tokens, [rng.choice([-0.1, -0.5, -0.5, -1.0, -3.0 * rng.random(), -math.inf]) for _ in tokens]


def drafted(seed, depth, width, max_nodes):
    """Return the tree, and the scores of all candidates by path: those named for the nodes of a frontier."""
    tree, candidates, paths = GrowingTree(max_nodes, width), {}, {ROOT: ()}
    for _ in range(depth):
        named = [children_of(paths[node], seed) for node in tree.frontier]
        for node, (tokens, values) in zip(tree.frontier, named, strict=True):
            for token, value in zip(tokens, values, strict=True):
                if value > -math.inf:
                    candidates[(*paths[node], token)] = candidates.get(paths[node], 0.0) + value
        before = dict(paths)
        tree.add_children(*zip(*named, strict=True))
        paths |= {node: (*before[tree.parent(node)], tree.token(node)) for node in tree.frontier}
        if not tree.frontier:
            break
    return tree, candidates


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 5), width=st.integers(1, 6), max_nodes=st.integers(1, 24))
def test_a_tree_is_the_best_of_all_candidates(seed, depth, width, max_nodes):
    tree, candidates = drafted(seed, depth, width, max_nodes)
    nodes = tree.nodes()
    paths = paths_of(nodes.token_ids, nodes.parents)
    assert len(paths) == len(set(paths)) == min(max_nodes, len(candidates)), "siblings are different tokens"
    assert all(-1 <= parent < node for node, parent in enumerate(nodes.parents))
    assert max(depths_of(nodes.parents), default=0) <= depth
    assert nodes.scores == [pytest.approx(candidates[path]) for path in paths]
    assert sorted(nodes.scores) == pytest.approx(sorted(candidates.values())[len(candidates) - len(paths) :])
    assert is_depth_first(nodes.parents)
    for node, parent in enumerate(nodes.parents):
        siblings = [nodes.scores[other] for other in range(node) if nodes.parents[other] == parent]
        assert all(score >= nodes.scores[node] for score in siblings)
    draft_of_trees([nodes, None], torch.device("cpu"), has_scores=True).check([depth, 0], [max_nodes, 0])


@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), max_nodes=st.integers(1, 24))
def test_a_frontier_is_the_best_of_a_level_that_the_tree_can_hold(seed, width, max_nodes):
    """A node outside the best ``max_nodes`` so far is never expanded; a forward has the frontier and its ancestors."""
    tree, candidates = drafted(seed, 3, width, max_nodes)
    level = sorted((score for path, score in candidates.items() if len(path) == 3), reverse=True)
    least = sorted(candidates.values(), reverse=True)[:max_nodes][-1]
    held = [score for score in level if score > least][:width]
    rows, parents = tree.frontier_rows()
    assert len(held) <= len(tree.frontier) <= width
    assert len(rows) <= max_nodes
    assert set(tree.frontier) <= set(rows)
    assert all(-1 <= parent < row for row, parent in enumerate(parents))
    assert [ROOT if p == ROOT else rows[p] for p in parents] == [tree.parent(node) for node in rows]


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), num_nodes=st.integers(1, 12))
def test_a_static_tree_grows_to_the_part_within_its_limits(seed, depth, num_nodes):
    rng = random.Random(seed)
    rates = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(3)]
    static = StaticTree(fit_tree(rates, 10))
    tree = GrowingTree(num_nodes, 10, static)
    for ranks in static.num_ranks[:depth]:
        tokens = [range(ranks)] * len(tree.frontier)
        tree.add_children(tokens, [[-9.0 * rng.random() for _ in range(ranks)] for _ in tokens])
    nodes, expected = tree.nodes(), static.within(depth, num_nodes)
    assert (nodes.token_ids, nodes.parents) == (expected.ranks, expected.parents)


def test_children_without_a_probability_are_left_out():
    tree = GrowingTree(8, 4)
    tree.add_children([[5, 6, 7]], [[-math.inf, math.nan, math.nan]])
    assert tree.frontier == []
    assert tree.nodes() == TreeNodes([], [], [])
    tree = GrowingTree(8, 4, StaticTree([(0,), (1,)]))
    tree.add_children([[5, 5]], [[-1.0, -math.inf]])
    assert tree.nodes().token_ids == [5]


def test_a_node_that_is_added_again_keeps_the_better_score():
    tree = GrowingTree(8)
    assert [tree.add(ROOT, 5, score) for score in (-1.0, -0.5, -2.0)] == [0, 0, 0]
    assert tree.nodes() == TreeNodes([5], [ROOT], [-0.5])


@pytest.mark.parametrize(
    ("proposals", "max_nodes", "tokens", "parents"),
    [
        ([[1, 2, 3]], 9, [1, 2, 3], [-1, 0, 1]),
        ([[1, 2], [1, 3]], 9, [1, 2, 3], [-1, 0, 0]),
        ([[1, 2], [4], [1, 3]], 9, [1, 2, 3, 4], [-1, 0, 0, -1]),  # depth first, children as they were named
        ([[1, 2], [4, 5], [1, 3]], 3, [1, 2, 4], [-1, 0, -1]),  # full within a proposal
        ([[1, 2], [3]], 1, [1], [-1]),
        ([[1], [1, 2]], 2, [1, 2], [-1, 0]),
        ([[], [5]], 4, [5], [-1]),
        ([], 4, [], []),
        ([[1]], 0, [], []),
    ],
)
def test_merged_continuations_by_hand(proposals, max_nodes, tokens, parents):
    assert merged(proposals, max_nodes) == (tokens, parents, [0.0] * len(tokens))


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12), st.integers(0, 20))
def test_merged_continuations_have_all_beginnings(proposals, max_nodes):
    tokens, parents, _ = merged(proposals, max_nodes)
    paths = paths_of(tokens, parents)
    assert len(set(paths)) == len(paths), "equal siblings"
    assert set(paths) == set(beginnings_of(proposals, max_nodes))
    assert is_depth_first(parents)
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
