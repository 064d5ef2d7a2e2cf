"""A tree while it is drafted; ``csrc/program/growing_tree.cpp`` is the same in C++.

A tree that follows the drafter's confidence (EAGLE-2, Li et al., arXiv 2406.16858, section 4) keeps the best of all
children that were named. A node's score is the sum of the log-probabilities on its path. Most trees are drafted level
by level: the drafter names likely children of the nodes of the *frontier*, and the best of these children are the next
frontier.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from specdec_fast.trees.parents import ROOT, depth_first, parents_among
from specdec_fast.trees.static import StaticTree


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


class GrowingTree:
    """The tree of one sequence while it is drafted: the best ``max_nodes`` of all children that were named.

    A child's score is at most its parent's, so the best nodes contain the parents of each. No child is wanted of a node
    that is not among the best ones so far.

    Args:
        max_nodes: the largest number of nodes.
        width: the largest number of nodes of a frontier.
        shape: a static tree. The children that are nodes of it count, and the score of a node is minus its place there,
            from 1 on. None: all children, by their log-probabilities.

    Attributes:
        max_nodes: as passed.
        frontier: the nodes whose children are wanted next, the best first; the root alone at first.

    """

    def __init__(self, max_nodes: int, width: int = 1, shape: StaticTree | None = None) -> None:
        self.max_nodes = max_nodes
        self._width = width
        self._shape = shape
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token
        self._places: dict[int, int] = {ROOT: ROOT}  # in the static tree, of each node
        self.frontier: list[int] = [ROOT]

    def add(self, parent: int, token: int, score: float) -> int:
        """Add a node and return it; a node with the same parent and token gets the better of both scores."""
        node = self._nodes.setdefault((parent, token), len(self._tokens))
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
        else:
            self._scores[node] = max(self._scores[node], score)
        return node

    def add_children(self, token_ids: Many[Many[int]], log_probs: Many[Many[float]]) -> None:
        """Add children of every node of the frontier, and move the frontier to the best of them.

        Args:
            token_ids: of the children of each node of ``frontier``, different ones, the likeliest first.
            log_probs: of each child under its parent, at most 0. Minus infinity and NaN leave a child out.

        """
        first = len(self._tokens)
        shape = self._shape
        for parent, ids, values in zip(self.frontier, token_ids, log_probs, strict=True):
            for rank, (token, value) in enumerate(zip(ids, values, strict=True)):
                if not value > float("-inf"):
                    continue
                if shape is None:
                    self.add(parent, token, self.score(parent) + min(value, 0.0))
                elif (place := shape.child(self._places[parent], rank)) != ROOT:
                    self._places[self.add(parent, token, -1.0 - place)] = place
        new = [node for node in self.best() if node >= first]
        self.frontier = [node for node in new if shape is None or shape.has_children(self._places[node])][: self._width]

    def best(self) -> list[int]:
        """Return the nodes that are kept, the best first; of equal scores the earlier node, so a parent first."""
        return sorted(range(len(self._tokens)), key=self._scores.__getitem__, reverse=True)[: self.max_nodes]

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
        return nodes, parents_among(nodes, self._parents)

    def token(self, node: int) -> int:
        """Return the token of a node."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """Return the parent of a node, or ``ROOT``."""
        return self._parents[node]

    def score(self, node: int) -> float:
        """Return the score of a node; that of the root is 0."""
        return 0.0 if node == ROOT else self._scores[node]

    def place(self, node: int) -> int:
        """Return the node of the static tree that a node of the frontier is, or ``ROOT``."""
        return self._places[node]

    def depth(self, node: int) -> int:
        """Return the number of nodes on the path to a node, itself included."""
        return 0 if node == ROOT else 1 + self.depth(self._parents[node])

    def path(self, node: int) -> list[int]:
        """Return the tokens of the nodes on the path to a node, itself included; none for the root."""
        return [] if node == ROOT else [*self.path(self._parents[node]), self._tokens[node]]

    def nodes(self) -> TreeNodes:
        """Return the tree."""
        nodes = depth_first(self.best(), self._parents)
        tokens = [self._tokens[node] for node in nodes]
        return TreeNodes(tokens, parents_among(nodes, self._parents), [self._scores[node] for node in nodes])


def merged(continuations: Iterable[Many[int]], max_nodes: int) -> TreeNodes:
    """Return several continuations of a sequence as one tree, in which equal beginnings are merged.

    Args:
        continuations: the likeliest first. Once the tree is full, later ones add nothing.
        max_nodes: the largest number of nodes.

    Returns:
        The tree, with scores of 0. Children are in the order in which the continuations have them, so the first
        continuation is the path of the first nodes, whose KV entries need no move.

    """
    added: dict[tuple[int, int], int] = {}  # nodes by parent and token
    for continuation in continuations:
        node = ROOT
        for token in continuation:
            if len(added) == max_nodes and (node, token) not in added:
                break
            node = added.setdefault((node, token), len(added))
    parents = [parent for parent, _ in added]
    tokens = [token for _, token in added]
    nodes = depth_first(range(len(added)), parents)
    return TreeNodes([tokens[node] for node in nodes], parents_among(nodes, parents), [0.0] * len(nodes))
