"""The rows of trees in one forward: their depths, the rows above them, and the bits of their masks."""

from __future__ import annotations

from specdec_fast.trees.rows import rows_of_trees


def test_rows_by_hand():
    """A tree of three nodes, a sequence without a draft, and a chain whose mask has two words."""
    rows = rows_of_trees([-1, 0, -1, *range(-1, 33)], [3, 0, 34])
    assert rows.depths.tolist() == [0, 1, 2, 1, 0, *range(35)]
    assert rows.parents.tolist() == [-1, 0, 1, 0, -1, *range(-1, 34)]
    assert rows.mask[:5].tolist() == [[0b1, 0], [0b11, 0], [0b111, 0], [0b1001, 0], [0b1, 0]]
    assert rows.mask[-1].tolist() == [-1, 0b111], "bit 31 is the sign"
