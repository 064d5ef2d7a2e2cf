"""The op ``compact_kv_``: move kept KV entries inside each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Case, Op


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


@dataclass(frozen=True)
class _Shape:
    moves: tuple[tuple[tuple[int, int], ...], ...]  # per sequence: (source, destination), ...
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 32
    page_size: int = 4
    planes: int = 2


def _make(shape: _Shape, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    pages = [1 + max((max(move) for move in moves), default=0) // shape.page_size for moves in shape.moves]
    num_pages = sum(pages) + 2  # one is the scratch page, one belongs to no sequence
    size = (shape.num_layers, shape.planes, num_pages, shape.page_size, shape.heads, shape.head_dim)
    order = (torch.randperm(num_pages - 1, generator=generator, device="cpu") + 1).to(torch.int32)
    block_table = torch.zeros(len(pages), max(pages, default=1), dtype=torch.int32, device="cpu")
    for b, count in enumerate(pages):
        block_table[b, :count] = order[sum(pages[:b]) :][:count]
    flat = [move for moves in shape.moves for move in moves]
    arrays = {
        "block_table": block_table,
        "cu_moves": torch.tensor([0, *map(len, shape.moves)], device="cpu").cumsum(0).to(torch.int32),
        "sources": torch.tensor([source for source, _ in flat], dtype=torch.int32, device="cpu"),
        "destinations": torch.tensor([destination for _, destination in flat], dtype=torch.int32, device="cpu"),
    }
    kv_cache = torch.randn(size, generator=generator, device="cpu").to(dtype)
    return {"kv_cache": kv_cache.to(device)} | {name: array.to(device) for name, array in arrays.items()}


def _cases() -> Iterator[Case]:
    path = ((10, 10), (13, 11), (14, 12), (21, 13))  # a tree's accepted path; the root does not move
    down = tuple((i + 3, i) for i in range(80))
    up = tuple((i, i + 5) for i in range(150))
    gather = ((0, 2), (1, 3), (2, 4), (9, 6), (10, 7), (11, 8), (30, 30), (31, 40))  # up, down, unmoved, up
    grid = (
        ("accepted_path", "the accepted path of a tree becomes a chain", _Shape((path, (), path[1:]))),
        ("down", "every source is the destination of a later move", _Shape((down,))),
        ("up", "every source is the destination of an earlier move", _Shape((up, down))),
        ("both_directions", "moves up and down in one sequence", _Shape((gather, gather[3:]))),
        ("page_of_one", "pages of one position", _Shape((gather, down[:5]), page_size=1)),
        ("odd_entries", "entries that are no multiple of a vector", _Shape((gather, up[:33]), heads=3, head_dim=20)),
        (
            "keys_alone",
            "keys and values of different sizes lie in tensors of their own",
            _Shape((path, down), planes=1),
        ),
        ("many_layers", "more layers than threads", _Shape((path,), num_layers=9)),
        ("no_moves", "sequences that keep everything", _Shape(((), ()))),
        ("empty", "no sequences", _Shape(())),
    )
    for name, why, shape in grid:
        yield Case(name, why, partial(_make, shape))


def _benchmarks() -> Iterator[Case]:
    kept = (0, 2, 5, 9, 14)  # kept entries of a tree of 16 after 1024 of context: the root, and one entry of each depth
    path = tuple((1024 + entry, 1024 + depth) for depth, entry in enumerate(kept))
    shape = _Shape((path,) * 8, num_layers=8, heads=8, head_dim=128, page_size=16)
    yield Case("accepted_path", "batch 8, trees of 16, 8 layers of Qwen3-8B", partial(_make, shape))


def _bytes_moved(kv_cache: Tensor, sources: Tensor, destinations: Tensor, **others: Tensor) -> int:
    per_entry = kv_cache.shape[0] * kv_cache.shape[1] * kv_cache.shape[4] * kv_cache.shape[5] * kv_cache.element_size()
    return 2 * int((sources != destinations).sum()) * per_entry  # read and written


OP = Op(
    name="compact_kv_",
    implementations={
        "torch": "specdec_fast.ops.compact_kv:compact_kv_",
        "cpp": "specdec_fast.ops.cpp:compact_kv_",
        "triton": "specdec_fast.triton_kernels.compact_kv:compact_kv_",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
)
