"""Arguments of ``grouped_quantized_linear``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from specdec_fast.quantization.packed_weight import PackedWeight, stacked
from specdec_fast.quantization.rounding import ROUNDINGS, rounded


def _draw(
    shape: tuple[int, int, int],
    choices: tuple[int, int],
    quantization: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    has_vectors: bool = False,
) -> dict[str, Any]:
    """Draw normal numbers; ``shape``: rows, in_features, out_features; ``choices``: choices per row, experts."""
    num_rows, in_features, out_features = shape
    num_choices, num_experts = choices
    rows = torch.randn(num_rows, num_choices if has_vectors else 1, in_features, generator=generator).to(dtype)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    num_drawn = min(num_experts, 8)  # rounding those of all experts of a benchmark would take seconds
    weights = torch.randn(num_drawn, out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(num_experts, out_features, generator=generator).to(dtype) if has_vectors else None
    drawn = [rounded(each, ROUNDINGS[quantization]) for each in weights]
    weight = stacked([drawn[expert % num_drawn] for expert in range(num_experts)])
    return {"rows": rows, "expert_ids": scores.topk(num_choices).indices, "weight": weight, "bias": bias}


def _bytes_moved(rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    chosen = len(expert_ids.unique())
    biases = 0 if bias is None else chosen * bias.shape[1]
    numbers = rows.numel() + biases + expert_ids.numel() * weight.out_features
    return numbers * rows.element_size() + weight.nbytes * chosen // len(weight.codes)


_LAYER = "gate and up of a layer of Qwen3-30B-A3B"

OP_CASES = OpCases(
    cases=(
        Case("packed_experts_one_row", "every expert has at most one row", partial(_draw, (1, 96, 64), (4, 8), "int4")),
        Case("packed_experts_rows", "several rows per expert", partial(_draw, (13, 64, 70), (3, 5), "int8")),
        Case("packed_experts_a8", "rounded rows", partial(_draw, (9, 100, 40), (2, 4), "int4-a8")),
        Case("packed_experts_vectors", "an input per choice, a bias", partial(_draw, (7, 67, 33), (2, 6), "int8-a8",
             has_vectors=True)),
        Case("packed_experts_no_rows", "an empty batch", partial(_draw, (0, 32, 16), (2, 4), "int4")),
    ),
    benchmarks=tuple(
        Case(f"packed_experts_{num_rows}", f"{why}, {_LAYER}", partial(_draw, (num_rows, 2048, 1536), (8, 128), "int4"))
        for num_rows, why in ((1, "plain decoding"), (6, "K 5"), (48, "batch 8, K 5"))
    ),
    bytes_moved=_bytes_moved,
)  # fmt: skip
