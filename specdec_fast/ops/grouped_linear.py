"""The op ``grouped_linear``: rows times the weights of the experts chosen for them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Op


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
            expert_bias = None if bias is None else bias[expert]
            out[row, choice] = torch.nn.functional.linear(line[None], weight[expert], expert_bias)[0]
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


OP = Op(
    name="grouped_linear",
    implementations={
        "torch": "specdec_fast.ops.grouped_linear:grouped_linear",
        "cpp": "specdec_fast.ops.cpp:grouped_linear",
        "triton": "specdec_fast.triton_kernels.grouped_linear:grouped_linear",
    },
    check=_check,
    exact=False,
)
