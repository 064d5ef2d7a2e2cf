"""The op ``compact_kv_``: move kept KV entries inside each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Op


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


def _check(kv_cache: Tensor, block_table: Tensor, cu_moves: Tensor, sources: Tensor, destinations: Tensor) -> None:
    device = kv_cache.device
    num_moves = sources.shape[0]
    expect_tensor("kv_cache", kv_cache, (None,) * 6, FLOATS, device)
    expect_tensor("block_table", block_table, (None, None), (torch.int32,), device)
    expect_tensor("cu_moves", cu_moves, (block_table.shape[0] + 1,), (torch.int32,), device)
    expect_tensor("sources", sources, (num_moves,), (torch.int32,), device)
    expect_tensor("destinations", destinations, (num_moves,), (torch.int32,), device)
    expect(
        all(x.is_contiguous() for x in (kv_cache, block_table, cu_moves, sources, destinations)),
        "kv_cache, block_table, cu_moves, sources and destinations must be contiguous.",
    )
    expect_offsets("cu_moves", cu_moves, num_moves, strictly=False)
    if num_moves and device.type == "cpu":  # on a device, reading them would wait
        later = torch.ones(num_moves, dtype=torch.bool, device="cpu")
        later[cu_moves[:-1][cu_moves[:-1] < num_moves].long()] = False  # the first move of a sequence follows no other
        for name, positions in (("sources", sources), ("destinations", destinations)):
            rises = positions.diff(prepend=positions[:1] - 1) > 0
            expect(bool(rises[later].all()), f"{name} must rise strictly within a sequence; got {positions.tolist()}.")


OP = Op(
    name="compact_kv_",
    implementations={
        "torch": "specdec_fast.ops.compact_kv:compact_kv_",
        "cpp": "specdec_fast.ops.cpp:compact_kv_",
        "triton": "specdec_fast.triton_kernels.compact_kv:compact_kv_",
    },
    check=_check,
)
