"""The op ``linear``: rows times a weight matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Op


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by weights, as ``torch.nn.functional.linear`` does: ``[T, out_features]`` in the dtype of ``rows``.

    Sums are in fp32 and rounded once. The C++ and Triton implementations add an output's products in one order,
    whatever the number of rows, so a row has the same bits alone and among others. This implementation is PyTorch's
    own, which does not promise that.

    Args:
        rows: ``[T, in_features]`` of fp32, fp16 or bf16.
        weight: ``[out_features, in_features]``, contiguous, of the same dtype.
        bias: ``[out_features]`` of the same dtype, or None.
    """
    return torch.nn.functional.linear(rows, weight, bias)


def _check(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expect_tensor("rows", rows, (None, None), FLOATS, rows.device)
    expect_tensor("weight", weight, (None, rows.shape[1]), (rows.dtype,), rows.device)
    expect(rows.shape[1] > 0, "rows have no features.")
    expect(weight.is_contiguous(), "weight must be contiguous.")
    if bias is not None:
        expect_tensor("bias", bias, (weight.shape[0],), (rows.dtype,), rows.device)
        expect(bias.is_contiguous(), "bias must be contiguous.")


OP = Op(
    name="linear",
    implementations={
        "torch": "specdec_fast.ops.linear:linear",
        "cpp": "specdec_fast.ops.cpp:linear",
        "triton": "specdec_fast.triton_kernels.linear:linear",
    },
    check=_check,
    exact=False,
    invariant=frozenset({"cpp", "triton"}),
    # The Triton kernel computes fp32 without tensor cores; on an H100 it took 5 times as long as cuBLAS for one row.
    preference={("cuda", torch.float32): ("torch",)},
)
