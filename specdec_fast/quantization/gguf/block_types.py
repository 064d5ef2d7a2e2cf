"""GGUF's quantised tensor types: from the bytes of their blocks to codes, scales and minima, without rounding.

A block is a run of weights of one output, with its scales before, behind or between its codes. Types that end in ``_K``
have blocks of 256, whose groups have small integers as scales, multiplied by an fp16 number of the whole block; both
are kept, and the op multiplies them in fp32, as llama.cpp does. 5- and 6-bit codes are kept in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.quantization.packed_weight import (
    INT8,
    OF_GROUPS,
    OF_PANELS,
    PANEL,
    TABLE,
    PackedWeight,
    dequantized,
    joined,
    pack,
    with_super_scales,
)

_SLICE = 1 << 22  # weights that are decoded at a time, so that intermediate results stay small
_FROM_MINUS_8 = tuple(float(value) for value in range(-8, 8))
_FROM_0 = tuple(float(value) for value in range(16))
# The levels of IQ4_NL, as llama.cpp defines the format.
_IQ4_NL = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Decoded blocks.

    Attributes:
        codes: ``[blocks, weights]``: uint8 from 0 to 15 for types with a table, else int8.
        scales: ``[blocks, groups]`` fp16, or int8 with super-scales.
        mins: as ``scales``, or None.
        super_scales, super_mins: ``[blocks, 1]`` fp16, or None.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    super_scales: Tensor | None = None
    super_mins: Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A quantised tensor type.

    Attributes:
        block_size: weights of a block.
        block_bytes: bytes of a block.
        group_size: weights that share a scale.
        decode: from ``[blocks, block_bytes]`` uint8 to :class:`_Blocks`.
        table: values of 4-bit codes; None: codes have 8 bits.
    """

    block_size: int
    block_bytes: int
    group_size: int
    decode: Callable[[Tensor], _Blocks]
    table: tuple[float, ...] | None = None


def packed(raw: Tensor, block_type: BlockType, rounds_rows: bool = False) -> PackedWeight:
    """Pack the blocks of a matrix.

    Args:
        raw: ``[out_features, bytes of a row]`` uint8, the bytes of the file.
        block_type: of the tensor.
        rounds_rows: see :class:`~specdec_fast.quantization.packed_weight.PackedWeight`.

    Raises ValueError if scales or minima are not finite.
    """
    whole: PackedWeight | None = None
    for rows in _slices(raw, block_type):
        part = _packed_slice(raw[rows], block_type, rounds_rows)
        if whole is None:
            whole = _empty(part, len(raw))
        first = rows.start // PANEL
        for tensor, values in zip(whole.of_panels, part.of_panels, strict=True):
            tensor[first : first + len(values)] = values
    assert whole is not None
    return whole


def weights_of(raw: Tensor, block_type: BlockType, dtype: torch.dtype) -> Tensor:
    """Return the weights ``[out_features, in_features]`` of a matrix, computed in fp32 and rounded to a dtype.

    Arguments and errors are those of ``packed``.
    """
    in_features = raw.shape[1] // block_type.block_bytes * block_type.block_size
    weights = torch.empty(len(raw), in_features, dtype=dtype, device=raw.device)
    for rows in _slices(raw, block_type):
        weights[rows] = dequantized(_packed_slice(raw[rows], block_type, False), torch.float32).to(dtype)
    return weights


def _empty(part: PackedWeight, out_features: int) -> PackedWeight:
    """Return a weight like a part of it, with memory for all outputs."""
    panels = -(-out_features // PANEL)
    return joined([part], lambda each: each[0].new_empty(panels, *each[0].shape[1:]), out_features)


def _slices(raw: Tensor, block_type: BlockType) -> list[slice]:
    in_features = raw.shape[1] // block_type.block_bytes * block_type.block_size
    count = max(PANEL, _SLICE // in_features // PANEL * PANEL)  # whole panels, so that slices can be joined
    return [slice(start, start + count) for start in range(0, len(raw), count)]


def _packed_slice(raw: Tensor, block_type: BlockType, rounds_rows: bool) -> PackedWeight:
    blocks = block_type.decode(raw.reshape(-1, block_type.block_bytes))
    for name in OF_GROUPS:
        numbers = getattr(blocks, name)
        if numbers is not None and not numbers.is_meta and not torch.isfinite(numbers).all():
            raise ValueError(f"it has {'minima' if name.endswith('mins') else 'scales'} that are not finite")
    codes, scales, mins, super_scales, super_mins = (
        None if each is None else each.reshape(len(raw), -1) for each in (getattr(blocks, name) for name in OF_PANELS)
    )
    assert codes is not None
    assert scales is not None
    table = None if block_type.table is None else torch.tensor(block_type.table, device=raw.device)
    kind = INT8 if table is None else TABLE
    weight = pack(codes.view(torch.uint8), scales, mins, table, block_type.group_size, kind, rounds_rows)
    return weight if super_scales is None else with_super_scales(weight, super_scales, super_mins)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return ``[blocks, 1]`` fp16: the number at byte ``start`` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(data: Tensor, bits: int, width: int) -> Tensor:
    """Return ``[blocks, codes]``: of each run of ``width`` bytes first the lowest ``bits`` bits, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    runs = data.reshape(len(data), -1, 1, width)
    return ((runs >> shifts) & ((1 << bits) - 1)).reshape(len(data), -1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return ``[blocks, 32]`` of 0 or 16: bit ``i`` of the four bytes at ``start`` belongs to weight ``i``."""
    return _fields(blocks[:, start : start + 4], 1, 1) << 4


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scales and minima ``[blocks, 8]``, and what both are multiplied with, of Q4_K and Q5_K.

    Their blocks begin with two fp16 numbers and twelve bytes of 6 bits. The file's minima are subtracted.
    """
    low = blocks[:, 4:8]
    middle = blocks[:, 8:12]
    high = blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    mins = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    return scales.view(torch.int8), mins.view(torch.int8), _halves(blocks, 0), -_halves(blocks, 2)


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 2:], 4, 16), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 4:], 4, 16), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> _Blocks:
    codes = (_fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)).view(torch.int8) - 16
    return _Blocks(codes, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Blocks:
    codes = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return _Blocks(codes.view(torch.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 16:], 4, 32), *_scales_of_k(blocks))


def _q5_k(blocks: Tensor) -> _Blocks:
    codes = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _Blocks(codes.view(torch.int8), *_scales_of_k(blocks))


def _q6_k(blocks: Tensor) -> _Blocks:
    codes = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Blocks(codes.view(torch.int8) - 32, scales, super_scales=_halves(blocks, 208))


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 32, _q4_0, _FROM_MINUS_8),
    "Q4_1": BlockType(32, 20, 32, _q4_1, _FROM_0),
    "Q5_0": BlockType(32, 22, 32, _q5_0),
    "Q5_1": BlockType(32, 24, 32, _q5_1),
    "Q8_0": BlockType(32, 34, 32, _q8_0),
    "Q4_K": BlockType(256, 144, 32, _q4_k, _FROM_0),
    "Q5_K": BlockType(256, 176, 32, _q5_k),
    "Q6_K": BlockType(256, 210, 16, _q6_k),
    "IQ4_NL": BlockType(32, 18, 32, _q4_0, _IQ4_NL),  # as Q4_0, with other values
}
