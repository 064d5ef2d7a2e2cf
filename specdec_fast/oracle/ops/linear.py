"""Oracle of ``linear``: rows times a weight matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply every row by the weights, as ``torch.nn.functional.linear`` does.

    The C++ and Triton implementations add an output's products in one order, whatever the number of rows. So a row has
    the same bits alone and among others. This implementation is PyTorch's own, which does not promise that.

    Args:
        rows: ``[T, in_features]`` of fp32, fp16 or bf16.
        weight: ``[out_features, in_features]``, contiguous, of the same dtype.
        bias: ``[out_features]`` of the same dtype, or None.

    Returns:
        ``[T, out_features]`` in that dtype; sums are in fp32 and rounded once.

    """
    return torch.nn.functional.linear(rows, weight, bias)
