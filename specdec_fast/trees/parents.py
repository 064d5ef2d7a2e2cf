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
