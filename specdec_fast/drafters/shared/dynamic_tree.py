"""Trees whose shape follows the drafter's confidence (EAGLE-2, Li et al., arXiv 2406.16858, section 4).

A tree is drafted level by level: the drafter names likely children of the nodes of the *frontier*, and the best of
these children are the next frontier. A node's score is the sum of the log-probabilities on its path.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import nsmallest
from typing import NamedTuple

import torch

from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft
from specdec_fast.trees.static import StaticTree

ROOT = -1  # the last committed token


class TreeNodes(NamedTuple):
    """The nodes of one tree, depth first, the best child first.

    Attributes:
        token_ids: of each node.
        parents: as in ``Draft.parents``.
        scores: as in ``Draft.scores``.

    """

    token_ids: list[int]
    parents: list[int]
    scores: list[float]


def draft_of(trees: Many[TreeNodes | None], device: torch.device, has_scores: bool = True) -> Draft:
    """Return the draft of a batch.

    Args:
        trees: of each sequence, in batch order; None: no draft tokens.
        device: of the tokens.
        has_scores: whether the scores are log-probabilities.

    """
    drafted = [tree or TreeNodes([], [], []) for tree in trees]
    parents = torch.tensor([parent for tree in drafted for parent in tree.parents], dtype=torch.int32, device="cpu")
    scores = torch.tensor([score for tree in drafted for score in tree.scores], dtype=torch.float32, device="cpu")
    return Draft(
        to_device([token for tree in drafted for token in tree.token_ids], device),
        [len(tree.token_ids) for tree in drafted],
        parents,
        scores if has_scores else None,
    )


class DynamicTree:
    """The tree of one sequence while it is drafted: the best ``max_nodes`` of all children that were named.

    A child's score is at most its parent's, so the best nodes contain the parents of each. A node that is not among the
    best ones of the levels so far never will be, so it is dropped at once, and no forward computes it.

    Args:
        max_nodes: the largest number of nodes, at least 1.
        width: the largest number of nodes of a frontier.

    Attributes:
        frontier: the nodes whose children are wanted next, the best first; the root alone at first.

    """

    def __init__(self, max_nodes: int, width: int) -> None:
        self._max_nodes = max_nodes
        self._width = width
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._ranks: list[int] = []
        self._scores: list[float] = []
        self._best: list[int] = []  # the nodes that are kept, the best first
        self.frontier: list[int] = [ROOT]

    def add_children(self, token_ids: Many[Many[int]], log_probs: Many[Many[float]]) -> None:
        """Add children of every node of the frontier, and move the frontier to the best of them.

        Args:
            token_ids: of the children of each node of ``frontier``, different ones.
            log_probs: of each child under its parent, at most 0. Minus infinity and NaN leave a child out.

        """
        first = len(self._tokens)
        for parent, ids, values in zip(self.frontier, token_ids, log_probs, strict=True):
            above = 0.0 if parent == ROOT else self._scores[parent]
            for rank, (token, value) in enumerate(zip(ids, values, strict=True)):
                if value > float("-inf"):
                    self._tokens.append(token)
                    self._parents.append(parent)
                    self._ranks.append(rank)
                    self._scores.append(above + min(value, 0.0))
        candidates = [*self._best, *range(first, len(self._tokens))]
        # Of equal scores the earlier node: a parent comes before its children.
        self._best = nsmallest(self._max_nodes, candidates, key=lambda node: (-self._scores[node], node))
        self.frontier = [node for node in self._best if node >= first][: self._width]

    def frontier_rows(self) -> tuple[list[int], list[int]]:
        """Return the nodes that a forward over the frontier needs: its nodes and those above them.

        Returns:
            The nodes, parents before their children; and the parent of each as its place in this list, or ``ROOT``.
            There are at most ``max_nodes``.

        """
        needed: set[int] = set()
        for frontier_node in self.frontier:
            node = frontier_node
            while node != ROOT and node not in needed:
                needed.add(node)
                node = self._parents[node]
        nodes = sorted(needed)
        places = {node: place for place, node in enumerate(nodes)}
        return nodes, [places.get(self._parents[node], ROOT) for node in nodes]

    def token(self, node: int) -> int:
        """Return the token of a node."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """Return the parent of a node, or ``ROOT``."""
        return self._parents[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node and of those above it, from depth 1 on; of the root, none."""
        return () if node == ROOT else (*self.path(self._parents[node]), self._ranks[node])

    def nodes(self) -> TreeNodes:
        """Return the tree."""
        children: dict[int, list[int]] = {}
        for node in self._best:
            children.setdefault(self._parents[node], []).append(node)
        found = TreeNodes([], [], [])
        to_visit = [(node, ROOT) for node in reversed(children.get(ROOT, ()))]
        while to_visit:
            node, place = to_visit.pop()
            to_visit += [(child, len(found.token_ids)) for child in reversed(children.get(node, ()))]
            found.token_ids.append(self._tokens[node])
            found.parents.append(place)
            found.scores.append(self._scores[node])
        return found


class RankPaths:
    """A static tree as a ``DynamicTree``: a node's score is minus its place in the tree, not a log-probability.

    Args:
        tree: the rank paths, the likeliest first.

    """

    def __init__(self, tree: StaticTree) -> None:
        self.tree = tree
        self._places = {choice: place for place, choice in enumerate(tree.choices, start=1)}
        self._inner = {choice[:-1] for choice in tree.choices}

    def num_ranks(self, depth: int) -> int:
        """Return the number of children to name for nodes ``depth`` levels below the root; 0 below the tree."""
        return self.tree.num_ranks[depth] if depth < len(self.tree.num_ranks) else 0

    def add_children(self, tree: DynamicTree, token_ids: Many[Many[int]], log_probs: Many[Many[float]]) -> None:
        """Add those children of the frontier that are nodes, and leave the nodes without children out of the next one.

        Args:
            tree: of which all children have been added by this method.
            token_ids: as in ``DynamicTree.add_children``, the likeliest first.
            log_probs: minus infinity and NaN leave a child out.

        """
        chosen = []
        for node, values in zip(tree.frontier, log_probs, strict=True):
            path = tree.path(node)
            place = self._places.get(path, 0)
            places = [self._places.get((*path, rank)) for rank in range(len(values))]
            chosen.append(
                [
                    place - own if own is not None and value > float("-inf") else float("-inf")
                    for own, value in zip(places, values, strict=True)
                ]
            )
        tree.add_children(token_ids, chosen)
        tree.frontier = [node for node in tree.frontier if tree.path(node) in self._inner]
