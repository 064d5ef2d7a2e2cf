"""A tree as the parents of its nodes: depths, parts of it, and an order of its nodes.

A node is a draft token. Its parent is an earlier node of its sequence, or ``ROOT``.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

ROOT = -1  # the last committed token of a sequence; not a node


def depths_of(parents: Many[int]) -> list[int]:
    """Return the depth of each node of one tree: 1 for a child of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def parents_among(nodes: Many[int], parents: Many[int]) -> list[int]:
    """Return the parent of each of some nodes as its place among them, or ``ROOT``; they hold the parents of each."""
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    return [places[parents[node]] for node in nodes]


def depth_first(nodes: Many[int], parents: Many[int]) -> list[int]:
    """Return nodes depth first: each one's children behind it, in the order in which ``nodes`` has them."""
    children: dict[int, list[int]] = {}
    for node in reversed(nodes):
        children.setdefault(parents[node], []).append(node)
    found: list[int] = []
    to_visit = children.get(ROOT, [])
    while to_visit:
        found.append(to_visit.pop())
        to_visit += children.get(found[-1], ())
    return found
