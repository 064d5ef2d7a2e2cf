"""Arguments of ``grouped_linear``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases


def _draw(
    shape: tuple[int, int, int],
    choices: tuple[int, int],
    layout: str,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw normal numbers; ``shape``: rows, in_features, out_features; ``choices``: choices per row, experts."""
    (num_rows, in_features, out_features) = shape
    (num_choices, num_experts) = choices
    num_vectors = num_choices if "vectors" in layout else 1
    rows = torch.randn(num_rows, num_vectors, in_features, generator=generator).to(dtype)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    weight = torch.randn(num_experts, out_features, in_features, generator=generator)
    weight = (weight / in_features**0.5).to(dtype)
    bias = torch.randn(num_experts, out_features, generator=generator).to(dtype) if "bias" in layout else None
    if "transposed" in layout:
        weight = weight.mT.contiguous().mT
    return {"rows": rows, "expert_ids": scores.topk(num_choices).indices, "weight": weight, "bias": bias}


def _bytes_moved(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    chosen = len(expert_ids.unique())
    per_expert = weight[0].numel() + (0 if bias is None else bias.shape[1])
    return (rows.numel() + chosen * per_expert + expert_ids.numel() * weight.shape[1]) * rows.element_size()


_ONE_ROW = "plain decoding: every expert has at most one row"
_LAYER = "gate and up of a layer of Qwen3-30B-A3B"

OP_CASES = OpCases(
    cases=(
        Case("experts_one_row", _ONE_ROW, partial(_draw, (1, 96, 64), (4, 8), "")),
        Case("experts_rows", "several scattered rows per expert", partial(_draw, (13, 64, 70), (3, 5), "bias")),
        Case("experts_vectors", "one input per choice; odd sizes", partial(_draw, (7, 67, 33), (2, 6), "vectors bias")),
        Case("experts_transposed", "transposed weights", partial(_draw, (9, 50, 75), (2, 4), "transposed bias")),
        Case("experts_vectors_transposed", "both", partial(_draw, (1, 300, 530), (3, 4), "vectors transposed")),
        Case("experts_all", "every row chooses every expert", partial(_draw, (3, 16, 1), (3, 3), "")),
        Case("experts_no_rows", "an empty batch", partial(_draw, (0, 32, 16), (2, 4), "bias")),
    ),
    benchmarks=tuple(
        Case(f"experts_{num_rows}", f"{why}, {_LAYER}", partial(_draw, (num_rows, 2048, 1536), (8, 128), ""))
        for num_rows, why in ((1, "plain decoding"), (6, "K 5"), (48, "batch 8, K 5"))
    ),
    bytes_moved=_bytes_moved,
)
