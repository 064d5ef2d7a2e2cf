"""The sums of TDPBF16PS, the instruction that multiplies tiles, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One rounding to fp32: the product of two bf16 is exact in fp64."""
    return (a.double()[:, None] * b.double() + c.double()).float()


def by_the_manual(rows: Tensor, weight: Tensor) -> Tensor:
    """Chains of even and of odd inputs over 32 of them; their sum is added to the element."""
    total = torch.zeros(len(rows), len(weight))
    for first in range(0, rows.shape[1], 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(first, min(first + 32, rows.shape[1])):
            if k % 2 == 0:
                even = fma(rows[:, k], weight[:, k], even)
            else:
                odd = fma(rows[:, k], weight[:, k], odd)
        total = total + (even + odd)
    return total


def one_chain(rows: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(rows), len(weight))
    for k in range(rows.shape[1]):
        total = fma(rows[:, k], weight[:, k], total)
    return total


def cancelling(num_rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """Rows and weights whose exact sums are zero, so that results are rounding, which depends on the order."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(
        -8, 9, (num_rows, in_features), generator=generator
    )  # otherwise few sums would be rounded
    rows = (torch.randn(num_rows, in_features, generator=generator) * sizes).bfloat16()
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = rows[:, :half][:, order], -weight[:, :half][:, order]
    rows[:, 2 * half :] = 0
    return rows, weight
