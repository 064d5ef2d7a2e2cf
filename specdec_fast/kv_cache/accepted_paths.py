"""KV entries after a tree was verified: those of the accepted path move to the slots of their positions."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from specdec_fast.device_copy import all_to_device
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops


def keep_paths(pool: PagePool, ops: Ops, roots: Many[tuple[Hashable, int]], paths: Many[Many[int]]) -> None:
    """Move the entries of each accepted path to where those of a chain would be, in all layers.

    Row r of a tree whose root is at position p has its entry in slot p + r. The row at depth d of the accepted path is
    at position p + d. Rows of a path rise, so no entry moves up.

    ``roots`` are the (owner, position) of each tree's root; ``paths`` the accepted rows besides it, counted from it.
    """
    places: list[int] = []
    sources: list[int] = []
    destinations: list[int] = []
    cu_moves = [0]
    for (owner, root), path in zip(roots, paths, strict=True):
        moved = [(row, depth) for depth, row in enumerate(path, start=1) if row != depth]
        if not moved:
            continue
        places.append(pool.place(owner))
        sources += [root + row for row, _ in moved]
        destinations += [root + depth for _, depth in moved]
        cu_moves.append(len(sources))
    if not places:
        return
    num_pages = max(sources) // pool.page_size + 1
    moves = (np.array(values, np.int32) for values in (cu_moves, sources, destinations))
    table, *moved_rows = all_to_device([pool.tables[:, :num_pages][places], *moves], pool.layout.device)
    if pool.layout.copies is not None:
        pool.layout.copies.compact(pool, table, moved_rows)
    move_entries(pool, ops, table, moved_rows)


def move_entries(pool: PagePool, ops: Ops, table: Tensor, moved_rows: Many[Tensor]) -> None:
    """Move entries in all layers of a pool: the arguments of ``compact_kv_``."""
    moves = {table.device: (table, *moved_rows)}
    for tensor in pool.tensors:
        if tensor.device not in moves:  # of layers that device_map has put on another device
            moves[tensor.device] = tuple(each.to(tensor.device) for each in (table, *moved_rows))
        ops.without_checks.compact_kv_(tensor, *moves[tensor.device])
