"""Trees as the rows of one forward, and which of these rows descend from which.

A sequence's row 0 is the root of its tree, the last committed token; row i + 1 is node i.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from specdec_fast.trees.parents import depths_of

TREE_MASK_BITS = 32  # rows per word of a tree mask


class TreeRows(NamedTuple):
    """The rows of one verification of trees, sequence after sequence; ``T`` rows."""

    depths: np.ndarray  # [T] int64, the number of rows above each row; 0 for a root
    # [T] int32, the row above each row, counted from the first row of its sequence, which has -1
    parents: np.ndarray
    mask: np.ndarray  # [T, num_words] int32, see PagedBatch.tree_mask


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
