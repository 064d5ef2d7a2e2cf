"""Writes linears as GPTQ, AWQ and mxfp4 checkpoints store them, number by number, from those formats' definitions."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the parts of a word, the lowest first


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def words(rows: Tensor, bits: int, outputs: tuple[int, ...] | None = None) -> Tensor:
    """Pack non-negative integers ``[rows, n]`` along n into int32 words, the lowest bits first."""
    per_word = 32 // bits
    places = outputs or tuple(range(per_word))
    packed = torch.zeros(rows.shape[0], rows.shape[1] // per_word, dtype=torch.int64)
    for word in range(packed.shape[1]):
        for place, output in enumerate(places):
            packed[:, word] |= rows[:, word * per_word + output].long() << (bits * place)
    return packed.to(torch.int32)  # wraps


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, group_of: Tensor, *, lower: bool
) -> dict[str, Tensor]:
    """Return the tensors of ``scale * (code - zero)``.

    ``codes`` is ``[out_features, in_features]``, ``zeros`` and ``scales`` are ``[out_features, groups]``; ``lower``:
    zeros are stored one lower, as the format ``"gptq"`` has them.
    """
    packed_zeros = words(zeros.t(), bits)
    if lower:
        packed_zeros = packed_zeros - {4: 0x11111111, 8: 0x01010101}[bits]
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": packed_zeros.contiguous(),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors of ``scale * (code - zero)``; shapes as of ``gptq``."""
    return {
        "qweight": words(codes.t(), 4, AWQ_OUTPUTS),
        "qzeros": words(zeros.t(), 4, AWQ_OUTPUTS),
        "scales": scales.t().contiguous(),
    }


def integer_weights(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """Return in fp64 what codes, zeros and scales stand for."""
    return scales.double()[:, group_of] * (codes - zeros[:, group_of]).double()
