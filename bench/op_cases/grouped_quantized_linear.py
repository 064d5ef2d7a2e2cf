"""Arguments of ``grouped_quantized_linear``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.op_cases.case import Case, OpCases
from bench.op_cases.quantized_linear import AWQ_A8, MXFP4, Q4_K, Q6_K, Format, drawn_weight
from specdec_fast.quantization.packed_weight import FLOAT8, INT8, PackedWeight, stacked
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


def _draw_codes(
    shape: tuple[int, int, int],
    choices: tuple[int, int],
    form: Format,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Draw codes of a checkpoint's kind; rows are a slice, so that they have any alignment."""
    num_rows, in_features, out_features = shape
    num_choices, num_experts = choices
    rows = torch.randn(num_rows, 1, in_features + 3, generator=generator).to(dtype)[..., 1 : in_features + 1]
    expert_ids = torch.rand(num_rows, num_experts, generator=generator).topk(num_choices).indices
    weight = stacked([drawn_weight(in_features, out_features, form, generator) for _ in range(num_experts)])
    bias = torch.randn(num_experts, out_features, generator=generator).to(dtype)
    return {"rows": rows, "expert_ids": expert_ids, "weight": weight, "bias": bias}


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
        Case("packed_experts_crowded", "many rows per expert", partial(_draw, (50, 64, 40), (2, 3), "int4-a8")),
        Case("packed_experts_float8", "fp8 of a checkpoint", partial(_draw_codes, (5, 130, 33), (2, 4),
             Format(FLOAT8, 128))),
        Case("packed_experts_mxfp4", "a table, bf16 scales", partial(_draw_codes, (3, 64, 20), (4, 5), MXFP4)),
        Case("packed_experts_awq", "minima, long groups", partial(_draw_codes, (4, 256, 17), (1, 3),
             replace(AWQ_A8, rounds_rows=False))),
        Case("packed_experts_awq_a8", "the same, rounded", partial(_draw_codes, (4, 256, 17), (1, 3), AWQ_A8)),
        Case("packed_experts_short", "short blocks", partial(_draw_codes, (6, 80, 31), (2, 3), Format(INT8, 16))),
        Case("packed_experts_q4_k", "two levels", partial(_draw_codes, (3, 300, 20), (2, 3), Q4_K)),
        Case("packed_experts_q6_k_a8", "rounded", partial(_draw_codes, (3, 300, 20), (2, 3),
             replace(Q6_K, rounds_rows=True))),
        Case("packed_experts_no_rows", "an empty batch", partial(_draw, (0, 32, 16), (2, 4), "int4")),
    ),
    benchmarks=tuple(
        Case(f"packed_experts_{num_rows}", f"{why}, {_LAYER}", partial(_draw, (num_rows, 2048, 1536), (8, 128), "int4"))
        for num_rows, why in ((1, "plain decoding"), (6, "K 5"), (48, "batch 8, K 5"))
    ),
    bytes_moved=_bytes_moved,
)  # fmt: skip
