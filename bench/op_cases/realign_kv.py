"""Arguments of ``realign_kv_``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


@dataclass(frozen=True)
class _Shape:
    moves: tuple[tuple[int, int, int], ...]  # per row: start, length, shift
    columns: int
    num_layers: int = 2
    heads: int = 2
    head_dim: int = 32
    transposed: bool = False  # columns before heads in memory

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        size = (len(self.moves), self.heads, self.columns + 1, self.head_dim)  # one more column than the rows use

        def layer() -> Tensor:
            tensor = torch.randn(size, generator=generator).to(dtype)
            if self.transposed:
                tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
            return tensor[:, :, : self.columns]

        starts, lengths, shifts = torch.tensor(self.moves, dtype=torch.int32).view(-1, 3).T.contiguous()
        layers = [(layer(), layer()) for _ in range(self.num_layers)]
        return {"layers": layers, "starts": starts, "lengths": lengths, "shifts": shifts}


def _bytes_moved(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> int:
    keys = layers[0][0]
    per_column = 2 * len(layers) * keys.shape[1] * keys.shape[3] * keys.element_size()
    return 2 * int(lengths[shifts != 0].sum()) * per_column  # read and written


_STEP = ((5, 90, -2), (0, 97, 1), (40, 60, 0), (12, 83, 5), (99, 0, -3))
_FAR = ((60, 40, -60), (0, 40, 60), (50, 50, -10))
_EMITTED = (1, 6, 3, 2, 1, 4, 6, 2)  # every emitted token adds a column of KV, here to a batch of equal lengths
_MOVES = tuple((0, 1024 + emitted, max(_EMITTED) - emitted) for emitted in _EMITTED)
_QWEN3_8B = _Shape(_MOVES, 1024 + max(_EMITTED), num_layers=8, heads=8, head_dim=128)

OP_CASES = OpCases(
    cases=(
        Case("step", "rows of a batch after a step: left, right, unmoved, empty", _Shape(_STEP, 101).draw),
        Case("no_overlap", "shifts longer than the content", _Shape(_FAR, 100).draw),
        Case("one_column", "the smallest shifts, both ways", _Shape(((1, 300, -1), (0, 300, 1)), 301).draw),
        Case("unmoved", "nothing to do", _Shape(((3, 20, 0), (0, 23, 0)), 23).draw),
        Case("odd_entries", "columns that are no multiple of a vector", _Shape(_STEP, 101, heads=3, head_dim=20).draw),
        Case("transposed", "columns before heads in memory", _Shape(_STEP, 101, transposed=True).draw),
        Case("many_layers", "more layers than threads", _Shape(_STEP[:2], 101, num_layers=9).draw),
        Case("empty", "no rows", _Shape((), 4).draw),
    ),
    benchmarks=(Case("step", "batch 8, K 5, 8 layers of Qwen3-8B", _QWEN3_8B.draw),),
    bytes_moved=_bytes_moved,
)
