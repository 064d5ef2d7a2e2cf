"""Packed weights of any size in the formats that engines round to, and fp8, without rounding a weight."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from specdec_fast.quantization.packed_weight import BLOCK, FLOAT8, INT8, PANEL, PackedWeight, pack
from specdec_fast.quantization.rounding import ROUNDINGS, rounded

FP8 = "fp8"  # e4m3 in blocks of 128 x 128 with fp32 scales, as Qwen3's checkpoints have it
_FP8_SIZE = 128
FORMATS = {name: rounded(torch.zeros(PANEL, BLOCK), rounding) for name, rounding in ROUNDINGS.items()}
FORMATS[FP8] = pack(
    torch.zeros(PANEL, _FP8_SIZE, dtype=torch.uint8), torch.zeros(PANEL, 1), None, None, _FP8_SIZE, FLOAT8
)
_WITHOUT_NAN = 0xBFBFBFBF - (1 << 32)  # fp8 codes without their highest bit of the exponent: magnitudes below 2


def unwritten(in_features: int, out_features: int, like: PackedWeight, num_experts: int | None = None) -> PackedWeight:
    """Return a weight, or that of all experts, in the format of ``like``, with codes and scales of any value."""
    before = [ceil(out_features / PANEL)] if num_experts is None else [num_experts, ceil(out_features / PANEL)]
    codes = like.codes.new_empty(*before, ceil(in_features / like.block_size), *like.codes.shape[2:])
    scales = like.scales.new_empty(*before, ceil(in_features / like.group_size), PANEL)
    return replace(like, codes=codes, scales=scales, in_features=in_features, out_features=out_features)


def drawn(weight: PackedWeight, device: torch.device, seed: int = 0) -> PackedWeight:
    """Return a weight of the same format and sizes on a device, with any codes; products with normal rows are about 1.

    Codes and scales after the last input and output are drawn, too.
    """
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.empty(weight.codes.shape, dtype=torch.int32, device=device)
    codes.random_(-(1 << 31), 1 << 31, generator=generator)
    if weight.kind == FLOAT8:
        codes &= _WITHOUT_NAN
    largest = 128.0 if weight.kind == INT8 else 2.0 if weight.kind == FLOAT8 else 8.0
    scales = torch.rand(weight.scales.shape, device=device, generator=generator)
    scales = (scales / (largest * weight.in_features**0.5)).to(weight.scales.dtype)
    table: Tensor | None = None if weight.table is None else weight.table.to(device)
    return replace(weight, codes=codes, scales=scales, table=table)
