"""Arguments of ``compact_kv_``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


@dataclass(frozen=True)
class _Shape:
    moves: tuple[tuple[tuple[int, int], ...], ...]  # per sequence: (source, destination), ...
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 32
    page_size: int = 4
    planes: int = 2

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        pages = [1 + max((max(move) for move in moves), default=0) // self.page_size for moves in self.moves]
        num_pages = sum(pages) + 2  # one is the scratch page, one belongs to no sequence
        size = (self.num_layers, self.planes, num_pages, self.page_size, self.heads, self.head_dim)
        order = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
        block_table = torch.zeros(len(pages), max(pages, default=1), dtype=torch.int32)
        for b, count in enumerate(pages):
            block_table[b, :count] = order[sum(pages[:b]) :][:count]
        flat = [move for moves in self.moves for move in moves]
        return {
            "kv_cache": torch.randn(size, generator=generator).to(dtype),
            "block_table": block_table,
            "cu_moves": torch.tensor([0, *map(len, self.moves)]).cumsum(0).to(torch.int32),
            "sources": torch.tensor([source for source, _ in flat], dtype=torch.int32),
            "destinations": torch.tensor([destination for _, destination in flat], dtype=torch.int32),
        }


def _bytes_moved(kv_cache: Tensor, sources: Tensor, destinations: Tensor, **others: Tensor) -> int:
    per_entry = kv_cache.shape[0] * kv_cache.shape[1] * kv_cache.shape[4] * kv_cache.shape[5] * kv_cache.element_size()
    return 2 * int((sources != destinations).sum()) * per_entry  # read and written


_PATH = ((10, 10), (13, 11), (14, 12), (21, 13))  # a tree's accepted path; the root does not move
_DOWN = tuple((i + 3, i) for i in range(80))
_UP = tuple((i, i + 5) for i in range(150))
_GATHER = ((0, 2), (1, 3), (2, 4), (9, 6), (10, 7), (11, 8), (30, 30), (31, 40))  # up, down, unmoved, up
# kept entries of a tree of 16 after 1024 of context: the root, and one entry of each depth
_KEPT = tuple((1024 + entry, 1024 + depth) for depth, entry in enumerate((0, 2, 5, 9, 14)))
_APART = "keys and values of different sizes lie in tensors of their own"
_QWEN3_8B = _Shape((_KEPT,) * 8, num_layers=8, heads=8, head_dim=128, page_size=16)

OP_CASES = OpCases(
    cases=(
        Case("accepted_path", "the accepted path of a tree becomes a chain", _Shape((_PATH, (), _PATH[1:])).draw),
        Case("down", "every source is the destination of a later move", _Shape((_DOWN,)).draw),
        Case("up", "every source is the destination of an earlier move", _Shape((_UP, _DOWN)).draw),
        Case("both_directions", "moves up and down in one sequence", _Shape((_GATHER, _GATHER[3:])).draw),
        Case("page_of_one", "pages of one position", _Shape((_GATHER, _DOWN[:5]), page_size=1).draw),
        Case("odd_entries", "no multiple of a vector", _Shape((_GATHER, _UP[:33]), heads=3, head_dim=20).draw),
        Case("keys_alone", _APART, _Shape((_PATH, _DOWN), planes=1).draw),
        Case("many_layers", "more layers than threads", _Shape((_PATH,), num_layers=9).draw),
        Case("no_moves", "sequences that keep everything", _Shape(((), ())).draw),
        Case("empty", "no sequences", _Shape(()).draw),
    ),
    benchmarks=(Case("accepted_path", "batch 8, trees of 16, 8 layers of Qwen3-8B", _QWEN3_8B.draw),),
    bytes_moved=_bytes_moved,
)
