"""Integer codes: unpacking them from int32 words, zero points, and groups whose inputs lie apart (act-order)."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.quantization.checkpoint.linear import LinearTensors
from specdec_fast.quantization.packed_weight import INT8, TABLE, TABLE_SIZE, PackedWeight, pack


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 ``[rows, words]``: uint8 ``[rows, words * 32 / bits]``, the lowest bits of a word first."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 8:
        return parts
    return torch.stack([parts & 15, parts >> 4], dim=-1).flatten(1)


def packed_integers(
    tensors: LinearTensors, codes: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, group_size: int
) -> PackedWeight:
    """Return the weight ``scale * (code - zero)``.

    Args:
        tensors: of the linear, for its name in errors.
        codes: ``[out_features, in_features]`` uint8, from 0 to ``2**bits - 1``.
        zeros: ``[out_features, groups]`` integers; None: half of ``2**bits`` each.
        scales: ``[out_features, groups]``.
        bits: 4 or 8.
        group_size: inputs that share a scale.

    Zeros that all are the same move the table of 4-bit codes; others become minima, in fp32 if the scales' dtype cannot
    represent them exactly. 4-bit codes whose minima fp32 cannot represent are held as 8 bits, without minima. Raises
    ConfigError for 8-bit codes whose minima fp32 cannot represent.
    """
    half = 1 << (bits - 1)
    offsets = None if zeros is None else half - zeros.to(torch.int64)
    middle = half
    if offsets is not None and bits == 4 and (offsets == offsets.flatten()[0]).all():
        middle = half - int(offsets.flatten()[0])
        offsets = None
    if offsets is not None and not offsets.any():
        offsets = None
    mins = None
    if offsets is not None:
        mins = _product(scales, offsets)
        if mins is None and bits == 4:
            higher = (offsets - half).to(codes.device, torch.int16).repeat_interleave(group_size, dim=1)
            values = codes.to(torch.int16) + higher
            return pack(values.to(torch.int8).view(torch.uint8), scales, None, None, group_size, INT8)
        if mins is None:
            raise tensors.fault(
                "*", f"has zero points, and scales of {scales.dtype}, whose products float32 cannot represent exactly."
            )
        scales = scales.to(mins.dtype)
    if bits == 8:
        return pack(codes ^ half, scales, mins, None, group_size, INT8)  # 128 less, in two's complement
    table = torch.arange(TABLE_SIZE, device=scales.device) - middle
    return pack(codes, scales, mins, table, group_size, TABLE)


def _product(scales: Tensor, offsets: Tensor) -> Tensor | None:
    """Return scales times integers in the scales' dtype or in fp32, whichever is exact first; None if neither is."""
    exact = scales.double() * offsets
    for dtype in (scales.dtype, torch.float32):
        if torch.equal(exact.to(dtype).double(), exact):
            return exact.to(dtype)
    return None


def order_of_groups(
    tensors: LinearTensors, suffix: str, in_features: int, group_size: int, num_groups: int
) -> Tensor | None:
    """Return the permutation that brings the inputs of each group together; None if they lie together.

    ``suffix`` names an int32 tensor ``[in_features]`` with the group of each input. Raises ConfigError if a group is
    out of range, or has another number of inputs than ``group_size``; the last group may have fewer.
    """
    group_of = tensors.take(suffix, (torch.int32, torch.int64), (in_features,)).long()
    outside = (group_of < 0) | (group_of >= num_groups)
    if outside.any():
        place = int(outside.nonzero()[0])
        raise tensors.fault(suffix, f"has group {int(group_of[place])} at {place}; expected 0 to {num_groups - 1}.")
    sizes = torch.bincount(group_of, minlength=num_groups)
    expected = torch.full_like(sizes, group_size)
    expected[-1] = in_features - group_size * (num_groups - 1)
    if not torch.equal(sizes, expected):
        place = int((sizes != expected).nonzero()[0])
        raise tensors.fault(
            suffix, f"has {int(sizes[place])} inputs in group {place}; expected {int(expected[place])}."
        )
    order = torch.argsort(group_of, stable=True)
    return None if torch.equal(order, torch.arange(in_features, device=order.device)) else order
