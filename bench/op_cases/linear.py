"""Arguments of ``linear``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


def _draw(
    shape: tuple[int, int, int],
    has_bias: bool,
    generator: torch.Generator,
    dtype: torch.dtype,
    is_sliced: bool = False,
) -> dict[str, Any]:
    """Draw normal numbers; ``shape``: rows, in_features, out_features. With ``is_sliced``, rows have any alignment."""
    num_rows, in_features, out_features = shape
    rows = torch.randn(num_rows, in_features + 3, generator=generator).to(dtype)
    rows = rows[:, 1 : in_features + 1] if is_sliced else rows[:, :in_features].contiguous()
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    return {"rows": rows, "weight": weight, "bias": bias}


def _bytes_moved(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    outputs = rows.shape[0] * weight.shape[0]
    elements = rows.numel() + weight.numel() + outputs + (0 if bias is None else bias.numel())
    return elements * rows.element_size()


_BENCHMARKED = (
    ("", (4096, 12_288), "an MLP of Qwen3-8B, whose weights fit into no cache"),
    ("_down", (12_288, 4096), "the layer behind it, with long rows"),
    ("_small", (1024, 3072), "an MLP of Qwen3-0.6B, whose weights fit into the last cache"),
    ("_tiny", (128, 352), "an MLP of the bundled target, whose weights fit into the first caches"),
)


def _benchmarks_of_rows(counts: Iterable[int]) -> tuple[Case, ...]:
    return tuple(
        Case(f"linear{suffix}_{num_rows}", what, partial(_draw, (num_rows, *features), False))
        for suffix, features, what in _BENCHMARKED
        for num_rows in counts
    )


OP_CASES = OpCases(
    cases=(
        Case("linear_one_row", "plain decoding", partial(_draw, (1, 96, 64), False)),
        Case("linear_rows", "several blocks of rows, a partial block of outputs", partial(_draw, (13, 160, 70), True)),
        Case("linear_odd", "features after the last full vector", partial(_draw, (5, 67, 33), True, is_sliced=True)),
        Case("linear_narrow", "less than one vector, a single output", partial(_draw, (3, 7, 1), True)),
        Case("linear_long", "sums of several chunks and a tail", partial(_draw, (2, 2100, 20), False)),
        Case("linear_threads", "enough outputs for several threads", partial(_draw, (6, 512, 515), True)),
        Case("linear_no_rows", "an empty batch", partial(_draw, (0, 32, 16), True)),
    ),
    benchmarks=_benchmarks_of_rows((1, 8, 48, 256, 1024)),  # plain decoding, a batch, batch 8 with K 5, two prompts
    bytes_moved=_bytes_moved,
    benchmarks_of_rows=_benchmarks_of_rows,
)
