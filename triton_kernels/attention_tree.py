"""Trees in ``paged_attention``: the path to every row, and the rows of a tile that are folded together.

Row r of a tree has its KV entry in slot prefix + r of its sequence. The row at depth d has the position prefix + d, and
its entry at position prefix + k is that of its ancestor at depth k. A kernel of its own writes these ancestors to
memory before attention, because finding them there would spill registers.

A *run* is a longest sequence of successive rows of a tile of which each is a child of the one before it. All rows of a
run are folded together, over the path of its last row. In a chain there is one run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.trees.rows import TREE_MASK_BITS
from specdec_fast.triton_kernels.attention_math import popcount
from specdec_fast.triton_kernels.variant import Launch, Variant


@triton.jit(do_not_specialize=("tree_mask", "paths", "tree_words"))
def _paths_kernel(
    tree_mask,  # [T, tree_words] int32
    paths,  # [T, 1 + tree_words * WORD_BITS] int32
    tree_words,
    WORD_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    bit = tl.arange(0, WORD_BITS)
    path = paths + row * (1 + tree_words * WORD_BITS)
    depth = -1  # of the row: its own bit counts no ancestor
    for word in range(tree_words):
        bits = tl.load(tree_mask + row * tree_words + word)
        # Parents precede their children, so the ancestor at depth k is the row of set bit number k.
        place = depth + 2 + popcount(bits & ((1 << bit) - 1))
        tl.store(path + place, word * WORD_BITS + bit, mask=((bits >> bit) & 1) == 1)
        depth += popcount(bits)
    tl.store(path, depth)


_LAUNCH = Launch({"WORD_BITS": TREE_MASK_BITS}, num_warps=1)


def paths_of(tree_mask: Tensor) -> Tensor:
    """Launch one kernel that finds the path to every row; nothing waits for the device.

    The mask is that of ``PagedBatch.tree_mask``. The result is ``[T, 1 + 32 * num_words]`` int32: each row's depth,
    then its ancestors at depths 0, 1, ..., itself last, as rows of its sequence. What follows is not set.
    """
    num_rows, num_words = tree_mask.shape
    paths = torch.empty(num_rows, 1 + num_words * TREE_MASK_BITS, dtype=torch.int32, device=tree_mask.device)
    _paths_kernel[(num_rows,)](tree_mask, paths, num_words, **_LAUNCH.options)
    return paths


def path_variants() -> Iterator[Variant]:
    """Yield the one compilation of the kernel."""
    yield _LAUNCH.variant("paths", _paths_kernel, {"tree_mask": "*i32", "paths": "*i32", "tree_words": "i32"}, ())


@triton.jit
def run_of(
    phase, begun,  # 0, or 1 + a row; the first row that no run has folded yet; rows are those of the tile
    row,  # [BLOCK_M] int32, the row of each pair
    row_position,  # [BLOCK_M] int32
    first_row, last_row,  # of the tile, as rows of the sequence
    paths,  # [rows, path_width] int32, from the tile's first row on
    path_width, prefix,
):  # fmt: skip
    """Return what a phase folds: phase 0 the entries before the sequence's rows, 1 + r the run that ends in row r.

    These are the positions of the pairs that take part, -1 for the others; the path of the run's last row; the end of
    its positions, 0 if no run ends here; the next ``begun``.
    """
    row_of_run = tl.maximum(phase - 1, 0)
    path = paths + row_of_run * path_width
    is_last = first_row + row_of_run >= last_row
    next_depth = tl.load(path + path_width, mask=not is_last, other=0)
    parent_of_next = tl.load(path + path_width + next_depth, mask=next_depth > 0, other=-1)  # a root has none
    ends = is_last | (parent_of_next != first_row + row_of_run)
    path_end = tl.where(phase == 0, prefix, tl.where(ends, prefix + tl.load(path) + 1, 0))
    takes_part = (phase == 0) | ((row >= begun) & (row <= row_of_run))
    return tl.where(takes_part, row_position, -1), path, path_end, tl.where(ends, phase, begun)


@triton.jit
def slots_of(position, inside, path, prefix):
    """Return the slots of a path's entries at the positions inside."""
    depth = position - prefix
    ancestor = tl.load(path + 1 + depth, mask=inside & (depth >= 0), other=0)
    return tl.where(depth < 0, position, prefix + ancestor)
