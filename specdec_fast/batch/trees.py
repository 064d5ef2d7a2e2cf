"""Trees of draft tokens: the depth of every node, and which rows of a forward descend from which.

A node is a draft token. Its parent is an earlier node of its sequence, or -1 for the root, the last committed token. In
a forward the root is a sequence's row 0, and node i its row i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from specdec_fast.batch.ragged_batch import TREE_MASK_BITS


class TreeRows(NamedTuple):
    """The rows of one verification of trees, sequence after sequence; ``T`` rows."""

    depths: np.ndarray  # [T] int64, the number of rows above each row; 0 for a root
    # [T] int32, the row above each row, counted from the first row of its sequence, which has -1
    parents: np.ndarray
    mask: np.ndarray  # [T, num_words] int32, see PagedBatch.tree_mask


def depths_of(parents: Many[int]) -> list[int]:
    """Return the depth of each node of one tree: 1 for a child of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def rows_of_trees(parents: Many[int], num_draft_tokens: Many[int]) -> TreeRows:
    """Return the rows of several trees, of which ``parents`` are those of all nodes, sequence after sequence."""
    depths: list[int] = []
    above: list[int] = []
    masks: list[int] = []  # bit i: the row descends from row i of its sequence
    first = 0
    for count in num_draft_tokens:
        own = parents[first : first + count]
        depths += [0, *depths_of(own)]
        above += [-1, *(parent + 1 for parent in own)]
        root = len(masks)
        masks.append(1)
        for row, parent in enumerate(own, start=1):
            masks.append(masks[root + parent + 1] | 1 << row)
        first += count
    num_bytes = -(-(max(num_draft_tokens, default=0) + 1) // TREE_MASK_BITS) * TREE_MASK_BITS // 8
    words = b"".join(mask.to_bytes(num_bytes, "little") for mask in masks)
    mask = np.frombuffer(words, "<i4").reshape(len(masks), -1).astype(np.int32)
    return TreeRows(np.array(depths, np.int64), np.array(above, np.int32), mask)
