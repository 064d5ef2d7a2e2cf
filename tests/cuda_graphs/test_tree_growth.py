"""Trees in a graph: their frontiers and what their rows see are those of ``GrowingTree`` on the host."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.runner.graphs.tree_growth import BestGrowth, DraftRows, StaticGrowth, static_levels
from specdec_fast.trees.growing import GrowingTree
from specdec_fast.trees.static import StaticTree

NUM_TREES = 5
CPU = torch.device("cpu")
STATIC = [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (3,), (0, 2, 1), (0, 0, 0, 0), (0, 0, 0, 0, 0)]


def named_children(generator, num_nodes, num_ranks):
    """Return tokens and log-probabilities of the children of some nodes; many are equal, and some name no token."""
    shape = (NUM_TREES, num_nodes, num_ranks)
    ids = torch.rand((*shape[:2], 100), generator=generator).argsort(dim=2)[:, :, :num_ranks]
    log_probs = torch.randint(-6, 1, shape, generator=generator).double() / 4
    kind = torch.randint(0, 9, shape, generator=generator)
    log_probs[kind == 0] = float("-inf")
    log_probs[kind == 1] = float("nan")
    return ids, log_probs


def paths_of(rows, tree):
    """Return the tokens above each row of the frontier, root first, and the row's own, from the tree mask."""
    num_rows = rows.tokens.shape[1]
    mask = rows.mask().view(NUM_TREES, num_rows, -1)[tree]
    paths = []
    for row in rows.frontier[tree].tolist():
        seen = [i for i in range(num_rows) if int(mask[row, i // 32]) >> i % 32 & 1]
        assert [int(rows.depths[tree, i]) for i in seen] == list(range(len(seen)))
        paths.append([int(rows.tokens[tree, i]) for i in seen])
    return paths


# The rows of a narrow tree: never all that were in a frontier; exactly so many; a frontier that is wider than the tree.
@pytest.mark.parametrize(("max_nodes", "width", "num_ranks"), [(6, 4, 4), (24, 4, 4), (3, 4, 2), (40, 8, 3), (1, 4, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_frontiers_are_those_of_the_host(max_nodes, width, num_ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    trees = [GrowingTree(max_nodes, width) for _ in range(NUM_TREES)]
    growth = BestGrowth(max_nodes, width)
    check_levels(trees, growth, max_nodes, lambda _: num_ranks, generator)


@pytest.mark.parametrize("seed", range(4))
def test_frontiers_of_static_trees_are_those_of_the_host(seed):
    shape = StaticTree(STATIC)
    trees = [GrowingTree(len(STATIC), len(STATIC), shape) for _ in range(NUM_TREES)]
    levels = static_levels(shape, CPU)
    assert [level.nodes for level in levels] == [[0, 1], [2, 3], [5], [8]]
    generator = torch.Generator().manual_seed(seed)
    check_levels(trees, StaticGrowth(levels), len(STATIC), shape.num_ranks.__getitem__, generator, finite=True)


def check_levels(trees, growth, max_nodes, num_ranks_of, generator, finite=False):
    roots = torch.arange(200, 200 + NUM_TREES)
    rows = DraftRows(roots, torch.zeros(NUM_TREES, 1), max_nodes + 1)
    num_levels = 5
    for depth in range(num_levels):
        ids, log_probs = named_children(generator, rows.frontier.shape[1], num_ranks_of(depth))
        log_probs = torch.nan_to_num(log_probs, nan=-1.0, neginf=-2.0) if finite else log_probs
        for i, tree in enumerate(trees):
            count = len(tree.frontier)
            tree.add_children(ids[i, :count].tolist(), log_probs[i, :count].tolist())
        frontier = growth.frontier(log_probs)
        if frontier is None:
            assert all(not tree.frontier for tree in trees)
            return
        children = frontier.parents * ids.shape[2] + frontier.ranks
        results = torch.full((NUM_TREES, rows.tokens.shape[1], 1), float(depth))
        rows.add(frontier, ids.flatten(1).gather(1, children), results)
        assert rows.tokens.shape[1] <= max_nodes + 1
        for i, tree in enumerate(trees):
            wanted = [[200 + i, *tree.path(node)] for node in tree.frontier]
            assert frontier.exists[i].tolist() == [k < len(wanted) for k in range(frontier.exists.shape[1])]
            assert paths_of(rows, i)[: len(wanted)] == wanted
            assert (rows.inputs[i, rows.frontier[i, : len(wanted)], 0] == depth).all()
    assert max(tree.depth(node) for tree in trees for node in tree.best()) > 1 or max_nodes == 1


def test_a_row_takes_the_result_of_the_row_above_it():
    rows = DraftRows(torch.tensor([7]), torch.tensor([[1.0]]), 9)
    growth = BestGrowth(8, 2)
    first = growth.frontier(torch.tensor([[[-1.0, -2.0]]], dtype=torch.float64))
    rows.add(first, torch.tensor([[5, 6]]), torch.tensor([[[10.0]]]))
    assert rows.inputs[0, :, 0].tolist() == [1, 10, 10]
    second = growth.frontier(torch.tensor([[[-3.0, -4.0], [-0.1, -0.2]]], dtype=torch.float64))
    rows.add(second, torch.tensor([[8, 9]]), torch.tensor([[[10.0], [20.0], [30.0]]]))
    assert rows.inputs[0, :, 0].tolist() == [1, 10, 10, 30, 30]
    assert rows.depths[0].tolist() == [0, 1, 1, 2, 2]
    assert rows.tokens[0].tolist() == [7, 5, 6, 8, 9]
