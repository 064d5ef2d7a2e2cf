"""Weights of several linears brought into one format, so that one packed weight can hold them: values stay as they are.

Linears of one checkpoint can differ in what their zero points need: another table, minima, wider scales, or 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec_fast.quantization.packed_weight import (
    INT8,
    PANEL,
    TABLE,
    TABLE_SIZE,
    PackedWeight,
    codes_of,
    joined,
    pack,
    scales_of,
)


def in_one_format(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Return weights with one kind, table and dtype of scales, with minima if one has them.

    Raises ValueError if they have several group sizes, or kinds of which none represents the others.
    """
    sizes = sorted({each.group_size for each in weights})
    if len(sizes) > 1:
        raise ValueError(f"groups of {' and '.join(map(str, sizes))} inputs cannot be held together.")
    found = list(weights)
    if any(each.table is not None for each in found):
        found = _of_one_table(found)
    kinds = sorted({each.kind for each in found})
    if len(kinds) > 1:
        raise ValueError(f"codes of the kinds {' and '.join(kinds)} cannot be held together.")
    dtypes = {each.scales.dtype for each in found}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    has_mins = any(each.mins is not None for each in found)
    return [_with_scales_of(each, dtype, has_mins) for each in found]


def by_output(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return the outputs of several weights of one format and one number of inputs as those of one."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(each.out_features % PANEL for each in weights):
        scales, mins = (
            None if part[0] is None else torch.cat(part)
            for part in zip(*(scales_of(each) for each in weights), strict=True)
        )
        codes = torch.cat([codes_of(each) for each in weights])
        assert scales is not None
        return pack(codes, scales, mins, first.table, first.group_size, first.kind, first.rounds_rows)
    return joined(weights, torch.cat, sum(each.out_features for each in weights))


def _of_one_table(weights: list[PackedWeight]) -> list[PackedWeight]:
    """Return weights with the table of the first that has one, or without tables, as 8-bit codes.

    A table that is a multiple of 1 higher everywhere means minima, which fp32 may be unable to represent.
    """
    first = next(each.table for each in weights if each.table is not None)
    moved = [_with_table(each, first) for each in weights]
    found = [each for each in moved if each is not None]
    return found if len(found) == len(weights) else [_of_8_bits(each) for each in weights]


def _with_table(weight: PackedWeight, table: Tensor) -> PackedWeight | None:
    if weight.table is None:
        return None
    higher = weight.table - table
    if not higher.any():
        return weight
    if weight.mins is not None or not (higher == higher[0]).all():
        return None
    exact = weight.scales.double() * float(higher[0])
    for dtype in (weight.scales.dtype, torch.float32):
        if torch.equal(exact.to(dtype).double(), exact):
            return replace(weight, scales=weight.scales.to(dtype), mins=exact.to(dtype), table=table)
    return None


def _of_8_bits(weight: PackedWeight) -> PackedWeight:
    if weight.table is None:
        return weight
    values = weight.table.to(torch.int8)
    if not torch.equal(values.float(), weight.table):
        raise ValueError(f"codes of the kinds {TABLE} and {INT8} cannot be held together, with a table of fractions.")
    scales, mins = scales_of(weight)
    assert len(values) == TABLE_SIZE
    codes = codes_of(weight).long()
    codes = values.to(codes.device)[codes].view(torch.uint8)
    return pack(codes, scales, mins, None, weight.group_size, INT8, weight.rounds_rows)


def _with_scales_of(weight: PackedWeight, dtype: torch.dtype, has_mins: bool) -> PackedWeight:
    scales = weight.scales.to(dtype)
    mins = weight.mins
    if has_mins:
        mins = torch.zeros_like(scales) if mins is None else mins.to(dtype)
    return replace(weight, scales=scales, mins=mins)
