"""Static trees in the choices format of Medusa (Cai et al., arXiv 2401.10774, section 2.3.3 and appendix C).

A choice is a path of ranks: ``(0, 2)`` is the third likeliest token at depth 2 under the likeliest one at depth 1.
"""

from __future__ import annotations

import heapq
import reprlib
from collections.abc import Iterable
from collections.abc import Sequence as Many
from functools import cache
from typing import Any, NamedTuple

from specdec_fast.errors import ConfigError
from specdec_fast.trees.parents import ROOT

MOST_NODES = 64


class Shape(NamedTuple):
    """A tree, depth first; each list has an entry per node."""

    depths: list[int]  # from 0, for children of the root
    ranks: list[int]  # of the node's token at its depth
    parents: list[int]  # as in Draft.parents


class StaticTree:
    """A tree that has the same rank paths in every step, and its parts that fit limits.

    Args:
        choices: rank paths, the likeliest first, from ``checked_choices``.

    Attributes:
        choices: the nodes, parents before their children.
        parents: of each node, or ``ROOT``.
        ranks: of each node's token at its depth.
        num_ranks: per depth, the number of ranks that are used.
    """

    def __init__(self, choices: Iterable[tuple[int, ...]]) -> None:
        self.choices: list[tuple[int, ...]] = []
        for choice in choices:  # parents first, so that any first nodes are a tree
            self.choices += [path for path in _paths_to(choice) if path not in self.choices]
        places = {choice: place for place, choice in enumerate(self.choices)}
        self.parents = [places.get(choice[:-1], ROOT) for choice in self.choices]
        self.ranks = [choice[-1] for choice in self.choices]
        self._children = {child: node for node, child in enumerate(zip(self.parents, self.ranks, strict=True))}
        depth = max(map(len, self.choices))
        self.num_ranks = [1 + max(c[d] for c in self.choices if len(c) > d) for d in range(depth)]
        self.within = cache(self._within)

    def child(self, node: int, rank: int) -> int:
        """Return the child of a node, or of the root, with a rank; ``ROOT`` if there is none."""
        return self._children.get((node, rank), ROOT)

    def has_children(self, node: int) -> bool:
        """Return whether a node has children."""
        return node in self.parents

    def level_below(self, nodes: Many[int]) -> list[int]:
        """Return the children of some nodes that have children themselves, in the order of the choices."""
        return [node for node, parent in enumerate(self.parents) if parent in nodes and self.has_children(node)]

    def _within(self, depth: int, num_nodes: int) -> Shape:
        """Return the first ``num_nodes`` choices of at most ``depth`` ranks, depth first, the likeliest child first."""
        kept = sorted([choice for choice in self.choices if len(choice) <= depth][:num_nodes])
        places = {choice: place for place, choice in enumerate(kept)}
        return Shape(
            depths=[len(choice) - 1 for choice in kept],
            ranks=[choice[-1] for choice in kept],
            parents=[places.get(choice[:-1], ROOT) for choice in kept],
        )


def chain(depth: int) -> list[tuple[int, ...]]:
    """Return the choices of a chain of the likeliest tokens."""
    return [(0,) * length for length in range(1, depth + 1)]


def checked_choices(value: Any, source: str) -> tuple[tuple[int, ...], ...]:
    """Return choices as tuples; ``source`` names the value in errors.

    Raises:
        ConfigError: it is not a list of 1 to 64 different paths of ranks from 0 on, or a path's parent is missing.
    """
    if (
        not isinstance(value, (list, tuple))
        or not all(isinstance(path, (list, tuple)) and path for path in value)
        or not all(type(rank) is int and rank >= 0 for path in value for rank in path)
    ):
        shown = reprlib.repr(value)
        raise ConfigError(f"{source} is {shown}; expected a list of rank paths, such as [[0], [0, 0], [1]].")
    choices = tuple(tuple(path) for path in value)
    if not 1 <= len(choices) <= MOST_NODES or len(set(choices)) < len(choices):
        raise ConfigError(
            f"{source} has {len(choices)} nodes, {len(set(choices))} of them different; expected 1 to {MOST_NODES} "
            "different ones."
        )
    known = set(choices)
    if orphan := next((path for path in choices if len(path) > 1 and path[:-1] not in known), None):
        node = reprlib.repr(list(orphan))
        parent = reprlib.repr(list(orphan[:-1]))
        raise ConfigError(f"{source} has the node {node} without its parent {parent}; add it.")
    return choices


def fit_tree(hit_rates: Many[Many[float]], max_nodes: int) -> list[tuple[int, ...]]:
    """Return the tree whose expected number of accepted tokens is largest, if the depths hit independently.

    The probability of a path is the product of its rates, which never rises from a node to its children. So the tree
    takes the likeliest node next to it, again and again. Its rank paths come likeliest first.

    Args:
        hit_rates: per depth and rank, how often the token of that rank is the target's, where its parent was accepted.
        max_nodes: the number of nodes; fewer if the rest has rate 0.
    """
    choices: list[tuple[int, ...]] = []
    candidates: list[tuple[float, tuple[int, ...]]] = [
        (-rate, (rank,)) for rank, rate in enumerate(hit_rates[0]) if rate > 0
    ]
    heapq.heapify(candidates)
    while candidates and len(choices) < max_nodes:
        weight, path = heapq.heappop(candidates)
        choices.append(path)
        if len(path) < len(hit_rates):
            for rank, rate in enumerate(hit_rates[len(path)]):
                if rate > 0:
                    heapq.heappush(candidates, (weight * rate, (*path, rank)))
    return choices


def _paths_to(choice: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [choice[:length] for length in range(1, len(choice) + 1)]
