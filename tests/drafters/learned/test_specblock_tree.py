"""The tree of SpecBlock keeps its best nodes, and branches as wide as the classes of its slots say."""

from __future__ import annotations

import math

from specdec_fast.drafters.specblock.tree import BlockTree, Slot
from specdec_fast.trees.parents import ROOT


def test_the_best_nodes_are_kept_and_equal_ones_merged():
    def slot(first, second, rank_class=0, confidence=0.6):
        return Slot((first, second), (math.log(confidence), math.log(0.3)), rank_class)

    tree = BlockTree(max_nodes=7, max_depth=6)
    tree.add_block(ROOT, [slot(1, 9), slot(2, 8), slot(3, 7), slot(4, 6)])
    expanded = tree.to_expand(10)
    assert [(tree.token(node), tree.depth(node)) for node in expanded[:3]] == [(1, 1), (2, 2), (9, 1)]
    assert len(expanded) == 7
    # Behind token 1 a better informed block drafts 2 again, then 5.
    tree.add_block(expanded[0], [slot(2, 8, confidence=0.99), slot(5, 3, confidence=0.99)])
    tokens, parents, _ = tree.nodes()
    assert len(tokens) == 7
    assert tokens[:3] == [1, 2, 5]
    assert parents[:3] == [-1, 0, 1]
    assert tokens.count(2) == 1
    assert len(set(zip(parents, tokens, strict=True))) == 7


def test_a_class_beyond_ends_branching_and_a_nan_ends_the_block():
    def slot(rank_class, probability=0.5):
        first = math.log(probability)
        return Slot((1, 2, 3), (first, math.log(0.2), math.log(0.1)), rank_class)

    tree = BlockTree(max_nodes=50, max_depth=8)
    tree.add_block(ROOT, [slot(0), slot(3), slot(2), slot(2)])
    parents = tree.nodes().parents
    assert parents.count(-1) == 3, "the first slot branches in any case"
    assert len(parents) == 3 + 1 + 1 + 1
    tree = BlockTree(max_nodes=50, max_depth=8)
    tree.add_block(ROOT, [slot(0), slot(1, math.nan), slot(1)])
    assert len(tree.nodes().token_ids) == 3
