"""Arguments of ``noise_words``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


def _draw(shape: tuple[int, int], largest_id: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """Draw seeds of 64 bits, and positions on both sides of 32 bits; ``dtype`` has no effect."""
    return {
        "seeds": torch.randint(-(2**63), 2**63 - 1, shape[:1], generator=generator),
        "positions": torch.randint(0, 2**34, shape[:1], generator=generator),
        "token_ids": torch.randint(0, largest_id + 1, shape, generator=generator),
    }


def _bytes_moved(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> int:
    return 8 * (2 * token_ids.numel() + seeds.numel() + positions.numel())


OP_CASES = OpCases(
    cases=(
        Case("level", "a level of trees: some nodes, some ranks", partial(_draw, (12, 10), 151_935)),
        Case("one", "one token of one row", partial(_draw, (1, 1), 31_999)),
        Case("wide", "more tokens than a block of the Triton kernel", partial(_draw, (3, 300), 4_000)),
        Case("no_tokens", "rows without tokens", partial(_draw, (4, 0), 9)),
        Case("no_rows", "no rows", partial(_draw, (0, 8), 9)),
    ),
    benchmarks=(Case("level", "batch 8, frontiers of 8 nodes, 8 ranks", partial(_draw, (64, 8), 151_935)),),
    bytes_moved=_bytes_moved,
)
