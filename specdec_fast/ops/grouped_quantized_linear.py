"""The op ``grouped_quantized_linear``: rows times the quantised weights of the experts chosen for them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.quantized_linear import check_packed, quantized_linear
from specdec_fast.ops.registry import Op
from specdec_fast.quantization.packed_weight import OF_GROUPS, PackedWeight, expert_of


def grouped_quantized_linear(
    rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """Multiply every row by the weights of each of its experts: ``[T, num_choices, out_features]``, in their dtype.

    A product is that of ``quantized_linear``, bit for bit. Raises IndexError if an expert id lies outside the experts.

    Args:
        rows: ``[T, 1, in_features]`` of fp32, fp16 or bf16, or ``[T, num_choices, in_features]``, one for each choice.
        expert_ids: ``[T, num_choices]`` int64, contiguous.
        weight: of all experts; see ``stacked`` in ``quantization/packed_weight.py``.
        bias: ``[num_experts, out_features]`` of the dtype of ``rows``, or None.
    """
    num_choices = expert_ids.shape[1]
    num_experts = len(weight.codes)
    out = rows.new_empty(*expert_ids.shape, weight.out_features)
    for row, ids in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            if not 0 <= expert < num_experts:
                raise IndexError(f"expert_ids has a {expert}; there are {num_experts} experts")
            vector = rows[row, choice if rows.shape[1] == num_choices else 0]
            expert_bias = None if bias is None else bias[expert]
            out[row, choice] = quantized_linear(vector[None], expert_of(weight, expert), expert_bias)[0]
    return out


def _check(rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    expect_tensor("rows", rows, (None, None, weight.in_features), FLOATS, rows.device)
    expect_tensor("expert_ids", expert_ids, (rows.shape[0], None), (torch.int64,), rows.device)
    expect(expert_ids.is_contiguous(), "expert_ids must be contiguous.")
    expect(
        rows.shape[1] in (1, expert_ids.shape[1]),
        f"rows has {rows.shape[1]} vectors per row; expected 1, or one for each of {expert_ids.shape[1]} choices.",
    )
    experts = len(weight.codes)
    expect(weight.codes.dim() == 5 and experts > 0, "codes have no axis of experts.")
    numbers = [tensor for name in OF_GROUPS if (tensor := getattr(weight, name)) is not None]
    same = all(tensor.dim() == 4 and len(tensor) == experts for tensor in numbers)
    expect(same, f"scales and mins must be those of {experts} experts.")
    expect(all(each.is_contiguous() for each in weight.tensors), "the tensors of a packed weight must be contiguous.")
    check_packed(expert_of(weight, 0), rows.device)
    if bias is not None:
        expect_tensor("bias", bias, (experts, weight.out_features), (rows.dtype,), rows.device)
        expect(bias.is_contiguous(), "bias must be contiguous.")


OP = Op(
    name="grouped_quantized_linear",
    implementations={
        "cpp": "specdec_fast.ops.cpp:grouped_quantized_linear",
        "torch": "specdec_fast.ops.grouped_quantized_linear:grouped_quantized_linear",
        "triton": "specdec_fast.triton_kernels.grouped_quantized_linear:grouped_quantized_linear",
    },
    check=_check,
    exact=False,
)
