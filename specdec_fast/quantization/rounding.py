"""Weights rounded to nearest at load: the formats of ``EngineConfig.quantization``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_fast.quantization.packed_weight import (
    BLOCK,
    INT8,
    PANEL,
    TABLE,
    TABLE_BYTES,
    PackedWeight,
    pack,
    packed_bytes,
)

# Value i - 8 of code i, as Q4_0 has it.
_INT4_TABLE = [float(value) for value in range(-8, 8)]
SCALE_DTYPE = torch.float16
_NUMBERS_AT_ONCE = 1 << 20  # what is rounded then fits into a processor's caches


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded: bits of a code, and whether the op rounds the rows as well."""

    bits: int
    rounds_rows: bool
    group_size: int = BLOCK

    def bytes_of(self, out_features: int, in_features: int, num_experts: int = 1) -> int:
        """Return the bytes of a rounded weight, or of those of several experts, which share a table."""
        each = packed_bytes(out_features, in_features, self.bits, self.group_size, SCALE_DTYPE, has_mins=False)
        return num_experts * each - (num_experts - 1) * TABLE_BYTES * (self.bits == 4)


ROUNDINGS = {
    "int8": Rounding(8, False),
    "int4": Rounding(4, False),
    "int8-a8": Rounding(8, True),
    "int4-a8": Rounding(4, True),
}


# Another setting: weights have codes already, and the op rounds the rows that are multiplied with them.
A8 = "a8"
QUANTIZATIONS = (*ROUNDINGS, A8)


def rounded(weight: Tensor, rounding: Rounding) -> PackedWeight:
    """Round a weight ``[out_features, in_features]`` to nearest, symmetrically, with a scale per output and group.

    With 8 bits the largest magnitude of a group becomes 127. With 4 bits the number of largest magnitude becomes -8,
    as llama.cpp's Q4_0 has it, which uses all 16 codes. Scales are fp16; codes are chosen for the scale as it is kept.
    A part of the outputs is rounded at a time, so that no copy of the whole weight exists.

    Raises ValueError if the weight has a number that is not finite, or a group that fp16 scales cannot represent.
    """
    out_features, in_features = weight.shape
    num_rows = max(1, _NUMBERS_AT_ONCE // (in_features * PANEL)) * PANEL
    first = _rounded_at_once(weight[:num_rows], rounding)
    if out_features <= num_rows:
        return first
    panels = -(-out_features // PANEL)
    codes = first.codes.new_empty(panels, *first.codes.shape[1:])
    scales = first.scales.new_empty(panels, *first.scales.shape[1:])
    for start in range(0, out_features, num_rows):
        part = _rounded_at_once(weight[start : start + num_rows], rounding) if start else first
        these = slice(start // PANEL, start // PANEL + len(part.codes))
        codes[these] = part.codes
        scales[these] = part.scales
    return replace(first, codes=codes, scales=scales, out_features=out_features)


def _rounded_at_once(weight: Tensor, rounding: Rounding) -> PackedWeight:
    out_features, in_features = weight.shape
    size = rounding.group_size
    num_groups = -(-in_features // size)
    numbers = torch.nn.functional.pad(weight.float(), (0, num_groups * size - in_features))
    groups = numbers.view(out_features, num_groups, size)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))  # with its sign; NaN, if there is one
    if not torch.isfinite(largest).all():
        raise ValueError("the weight has numbers that are not finite, which no scale represents.")
    scales = largest.abs() / 127 if rounding.bits == 8 else largest / -8
    kept = scales.to(SCALE_DTYPE)
    if not torch.isfinite(kept).all():
        raise ValueError(f"the weight has numbers up to {float(largest.abs().max()):.3g}, too large for fp16 scales.")
    inverse = torch.where(kept == 0, 0.0, 1 / kept.float())
    lowest, highest = (-127, 127) if rounding.bits == 8 else (-8, 7)
    values = (groups * inverse).round_().clamp_(lowest, highest).view(out_features, -1)[:, :in_features]
    if rounding.bits == 8:
        codes = values.to(torch.int8).view(torch.uint8)
        return pack(codes, kept.squeeze(2), None, None, size, INT8, rounding.rounds_rows)
    table = torch.tensor(_INT4_TABLE, device=weight.device)
    return pack(values.add_(8).to(torch.uint8), kept.squeeze(2), None, table, size, TABLE, rounding.rounds_rows)
