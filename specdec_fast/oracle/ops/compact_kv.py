"""Oracle of ``compact_kv_``: move kept KV entries inside each sequence."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def compact_kv_(kv_cache: Tensor, block_table: Tensor, cu_moves: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Move entry ``sources[m]`` of a sequence to its position ``destinations[m]``, in place, in all layers.

    Moves keep the order of entries: within a sequence both lists rise strictly. So no entry is overwritten before it is
    read if moves down are made in rising order and moves up in falling order. Two uses: the accepted path of a tree
    becomes a chain; with a block table of old and then new pages, a sequence moves to the new pages.

    Args:
        kv_cache: ``[num_layers, planes, num_pages, page_size, num_kv_heads, head_dim]``, contiguous; two planes hold
            keys and values, one plane either of them.
        block_table: ``[B, max_pages]`` int32, the pages of each sequence in order of position.
        cu_moves: ``[B + 1]`` int32, the index of each sequence's first move, and the number of moves.
        sources: ``[M]`` int32, positions in the sequence.
        destinations: ``[M]`` int32, positions in the sequence, whose old entries are lost.

    """
    page_size = kv_cache.shape[3]
    entries = kv_cache.flatten(2, 3)  # [num_layers, planes, slots, num_kv_heads, head_dim]
    for b, (start, stop) in enumerate(pairwise(cu_moves.tolist())):
        read, written = (
            block_table[b, positions // page_size].long() * page_size + positions % page_size
            for positions in (sources[start:stop].long(), destinations[start:stop].long())
        )
        entries[:, :, written] = entries[:, :, read]  # the right side is a copy
