"""The op ``grouped_linear``: rows times the weights of the experts chosen for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Case, Op


def grouped_linear(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply every row by the weights of each of its experts: ``[T, num_choices, out_features]``, in their dtype.

    In every implementation, a product's bits depend on its row and its expert alone; sums are in fp32 and rounded once.
    Here each product is computed by itself, from a copy of the row, because PyTorch's linears may sum in another order
    for another number of rows or another address. Raises IndexError if an expert id lies outside the experts.

    Args:
        rows: ``[T, 1, in_features]`` of fp32, fp16 or bf16, or ``[T, num_choices, in_features]``, one for each choice.
        expert_ids: ``[T, num_choices]`` int64, contiguous.
        weight: ``[num_experts, out_features, in_features]`` of the same dtype; it or its ``mT`` is contiguous.
        bias: ``[num_experts, out_features]`` of the same dtype, or None.
    """
    num_choices = expert_ids.shape[1]
    out = rows.new_empty(*expert_ids.shape, weight.shape[1])
    for row, ids in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            if not 0 <= expert < len(weight):
                raise IndexError(f"expert_ids has a {expert}; there are {len(weight)} experts")
            line = rows[row, choice if rows.shape[1] == num_choices else 0].clone()
            own_bias = None if bias is None else bias[expert]
            out[row, choice] = torch.nn.functional.linear(line[None], weight[expert], own_bias)[0]
    return out


def _check(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expect_tensor("rows", rows, (None, None, None), FLOATS, rows.device)
    expect_tensor("expert_ids", expert_ids, (rows.shape[0], None), (torch.int64,), rows.device)
    expect(expert_ids.is_contiguous(), "expert_ids must be contiguous.")
    expect(
        rows.shape[1] in (1, expert_ids.shape[1]),
        f"rows has {rows.shape[1]} vectors per row; expected 1, or one for each of {expert_ids.shape[1]} choices.",
    )
    expect_tensor("weight", weight, (None, None, rows.shape[2]), (rows.dtype,), rows.device)
    expect(rows.shape[2] > 0, "rows have no features.")
    expect(weight.is_contiguous() or weight.mT.is_contiguous(), "weight, or its mT, must be contiguous.")
    if bias is not None:
        expect_tensor("bias", bias, tuple(weight.shape[:2]), (rows.dtype,), rows.device)
        expect(bias.is_contiguous(), "bias must be contiguous.")


def _make(
    shape: tuple[int, int, int],
    choices: tuple[int, int],
    one_per_choice: bool,
    layout: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Make normal numbers; ``shape``: rows, in_features, out_features; ``choices``: choices per row, experts."""
    (num_rows, in_features, out_features) = shape
    (num_choices, num_experts) = choices
    rows = torch.randn(
        num_rows, num_choices if one_per_choice else 1, in_features, generator=generator, device="cpu"
    ).to(dtype)
    scores = torch.rand(num_rows, num_experts, generator=generator, device="cpu")
    weight = torch.randn(num_experts, out_features, in_features, generator=generator, device="cpu")
    weight = (weight / in_features**0.5).to(dtype)
    has_bias = "bias" in layout
    bias = torch.randn(num_experts, out_features, generator=generator, device="cpu").to(dtype) if has_bias else None
    if "transposed" in layout:
        weight = weight.mT.contiguous().mT
    expert_ids = scores.topk(num_choices).indices
    return {
        "rows": rows.to(device),
        "expert_ids": expert_ids.to(device),
        "weight": weight.to(device),
        "bias": None if bias is None else bias.to(device),
    }


def _cases() -> Iterator[Case]:
    grid: tuple[tuple[str, str, tuple[int, int, int], tuple[int, int], bool, str], ...] = (
        ("experts_one_row", "plain decoding: every expert has at most one row", (1, 96, 64), (4, 8), False, "plain"),
        ("experts_rows", "several rows per expert, in different places", (13, 64, 70), (3, 5), False, "plain bias"),
        ("experts_vectors", "one input per choice; odd sizes", (7, 67, 33), (2, 6), True, "plain bias"),
        ("experts_transposed", "transposed weights", (9, 50, 75), (2, 4), False, "transposed bias"),
        ("experts_vectors_transposed", "both", (1, 300, 530), (3, 4), True, "transposed"),
        ("experts_all", "every row chooses every expert", (3, 16, 1), (3, 3), False, "plain"),
        ("experts_no_rows", "an empty batch", (0, 32, 16), (2, 4), False, "plain bias"),
    )  # fmt: skip
    for name, why, shape, choices, one_per_choice, layout in grid:
        yield Case(name, why, partial(_make, shape, choices, one_per_choice, layout))


def _benchmarks() -> Iterator[Case]:
    for num_rows, why in ((1, "plain decoding"), (6, "K 5"), (48, "batch 8, K 5")):
        arguments = ((num_rows, 2048, 1536), (8, 128), False, "plain")
        yield Case(f"experts_{num_rows}", f"{why}, gate and up of a layer of Qwen3-30B-A3B", partial(_make, *arguments))


def _bytes_moved(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    chosen = len(expert_ids.unique())
    per_expert = weight[0].numel() + (0 if bias is None else bias.shape[1])
    return (rows.numel() + chosen * per_expert + expert_ids.numel() * weight.shape[1]) * rows.element_size()


OP = Op(
    name="grouped_linear",
    implementations={
        "torch": "specdec_fast.ops.grouped_linear:grouped_linear",
        "cpp": "specdec_fast.ops.cpp:grouped_linear",
        "triton": "specdec_fast.triton_kernels.grouped_linear:grouped_linear",
    },
    check=_check,
    cases=_cases,
    benchmarks=_benchmarks,
    bytes_moved=_bytes_moved,
    exact=False,
)
