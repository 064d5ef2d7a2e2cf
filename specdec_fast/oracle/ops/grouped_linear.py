"""Oracle of ``grouped_linear``: rows times the weights of the experts chosen for them."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply every row by the weights of each of its experts.

    In every implementation, a product's bits depend on its row and its expert alone. Here each product is computed by
    itself, from a copy of the row, because PyTorch's linears may sum in another order for another number of rows or
    another address.

    Args:
        rows: ``[T, 1, in_features]`` of fp32, fp16 or bf16, or ``[T, num_choices, in_features]``, one for each choice.
        expert_ids: ``[T, num_choices]`` int64, contiguous.
        weight: ``[num_experts, out_features, in_features]`` of the same dtype; it or its ``mT`` is contiguous.
        bias: ``[num_experts, out_features]`` of the same dtype, or None.

    Returns:
        ``[T, num_choices, out_features]`` in that dtype; sums are in fp32 and rounded once.

    Raises:
        IndexError: an expert id lies outside the experts.

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
