"""A quantised weight matrix in the layout that the op ``quantized_linear`` reads, and conversions from and to codes.

Outputs are divided into panels of 16, inputs into blocks of 32 (or 16). The codes of a block lie together: word ``w``
of lane ``o`` is an int32 of output ``o``, so the 16 lanes of a word are 64 contiguous bytes, an AVX-512 register.

* 8-bit codes: byte ``j`` of word ``w`` is the code of input ``4 w + j``.
* 4-bit codes: the low half of byte ``j`` of word ``w`` is the code of input ``8 w + j``, the high half that of input
  ``8 w + 4 + j``.

Inputs after the last one and outputs after the last one have code 0 and scale 0.

Scales and minima may have two levels, as those of llama.cpp's K types have: an 8-bit integer for each group, times a
fp16 number for 256 inputs. Their product is exact in fp32, so no bit differs from that of products which are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 16  # outputs of a panel
BLOCK = 32  # inputs of a block, if scales do not ask for shorter ones
SHORT_BLOCK = 16
TABLE_SIZE = 16  # values that a 4-bit code can have
TABLE_BYTES = 4 * TABLE_SIZE
# How a code becomes a value: two's complement, OCP float8 with 4 bits of exponent, or the entry of a table of 16.
INT8 = "int8"
FLOAT8 = "float8_e4m3"
TABLE = "table"
KINDS = (INT8, FLOAT8, TABLE)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SUPER_GROUP = 256  # inputs that share a super-scale, if scales have two levels
# The tensors of a packed weight: those with numbers of groups; those with an axis of panels, then one of blocks or
# groups; and all, in the order in which C++ takes them.
OF_GROUPS = ("scales", "mins", "super_scales", "super_mins")
OF_PANELS = ("codes", *OF_GROUPS)
TENSORS = ("codes", "table", *OF_GROUPS)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """Weights ``[out_features, in_features]``: ``scale * value(code) + minimum``, with one scale per output and group.

    Those of the experts of a layer are one packed weight too: codes, scales and mins have an axis of experts before the
    others (``stacked``).

    Attributes:
        codes: ``[panels, blocks, words, 16]`` int32, contiguous; see the module.
        scales: ``[panels, groups, 16]`` fp32, fp16 or bf16, contiguous; int8 if there are super-scales.
        mins: what every weight of a group has in addition, shape and dtype as ``scales``; None: nothing.
        table: ``[16]`` fp32, the values of 4-bit codes; None: codes have 8 bits.
        in_features, out_features: of the matrix, without padding.
        group_size: inputs that share a scale, a multiple of the block's.
        kind: ``INT8``, ``FLOAT8`` or ``TABLE``.
        rounds_rows: whether the op rounds each block of a row to 8-bit integers, so that products are exact integers.
            Values must be whole numbers then.
        super_scales: ``[panels, ceil(in_features / 256), 16]`` fp16, contiguous: what the scales of 256 inputs are
            multiplied with; None: scales have one level.
        super_mins: the same of the minima; None without super-scales, or without minima.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    table: Tensor | None
    in_features: int
    out_features: int
    group_size: int
    kind: str
    rounds_rows: bool = False
    super_scales: Tensor | None = None
    super_mins: Tensor | None = None

    @property
    def block_size(self) -> int:
        """The inputs of a block."""
        return self.codes.shape[-2] * (4 if self.table is None else 8)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it consists of."""
        return [each for name in TENSORS if (each := getattr(self, name)) is not None]

    @property
    def of_panels(self) -> list[Tensor]:
        """Those with an axis of panels: all but the table."""
        return [each for name in OF_PANELS if (each := getattr(self, name)) is not None]

    @property
    def nbytes(self) -> int:
        """The bytes that it holds."""
        return sum(each.nbytes for each in self.tensors)


def joined(
    weights: Sequence[PackedWeight], join: Callable[[list[Tensor]], Tensor], out_features: int | None = None
) -> PackedWeight:
    """Return one weight of weights of one format; ``join`` makes each tensor of theirs, but for the table.

    ``out_features``: None if the joined weight has those of the first one.
    """
    first = weights[0]
    parts = {name: [getattr(each, name) for each in weights] for name in OF_PANELS}
    tensors: dict[str, Any] = {name: None if each[0] is None else join(each) for name, each in parts.items()}
    return replace(first, out_features=out_features or first.out_features, **tensors)


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return the weights of several experts, of one shape and format, as one."""
    return joined(weights, torch.stack)


def expert_of(weight: PackedWeight, expert: int) -> PackedWeight:
    """Return the weight of one expert of a stacked one; it shares memory."""
    return joined([weight], lambda each: each[0][expert])


def packed_bytes(
    out_features: int, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, has_mins: bool
) -> int:
    """Return the bytes of a packed weight, without packing one."""
    panels = -(-out_features // PANEL)
    block = block_size_of(group_size)
    words = -(-in_features // block) * block * bits // 32
    groups = -(-in_features // group_size)
    table = TABLE_BYTES if bits == 4 else 0
    return panels * PANEL * (4 * words + groups * scale_dtype.itemsize * (2 if has_mins else 1)) + table


def block_size_of(group_size: int) -> int:
    """Return the inputs of a block for a group size. Raises ValueError if no block size divides it."""
    for size in (BLOCK, SHORT_BLOCK):
        if group_size > 0 and group_size % size == 0:
            return size
    raise ValueError(f"group_size is {group_size}; expected a positive multiple of {SHORT_BLOCK}.")


def pack(
    codes: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    table: Tensor | None,
    group_size: int,
    kind: str,
    rounds_rows: bool = False,
) -> PackedWeight:
    """Pack codes.

    Args:
        codes: ``[out_features, in_features]`` uint8: 4-bit codes, or the bits of 8-bit codes.
        scales: ``[out_features, groups]``.
        mins: shape and dtype of ``scales``, or None.
        table: ``[16]``, for 4-bit codes; None: codes have 8 bits.
        group_size: inputs that share a scale; the last group may be shorter.
        kind, rounds_rows: see :class:`PackedWeight`.

    Raises ValueError if shapes do not fit together.
    """
    out_features, in_features = codes.shape
    num_groups = -(-in_features // group_size)
    for name, tensor in (("scales", scales), ("mins", mins)):
        if tensor is not None and tuple(tensor.shape) != (out_features, num_groups):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{out_features}, {num_groups}].")
    block = block_size_of(group_size)
    num_blocks = -(-in_features // block)
    panels = -(-out_features // PANEL)
    missing = (0, num_blocks * block - in_features, 0, panels * PANEL - out_features)
    fours = pad(codes, missing).contiguous().view(torch.int32)  # of four inputs; little-endian, as everywhere
    lanes = fours.view(panels, PANEL, num_blocks, block // 4)
    if table is not None:
        halves = lanes.view(panels, PANEL, num_blocks, block // 8, 2)
        lanes = halves[..., 0] | (halves[..., 1] << 4)
    words = lanes.permute(0, 2, 3, 1).contiguous()
    packed_table = None if table is None else table.to(torch.float32).contiguous()
    return PackedWeight(
        codes=words,
        scales=_by_panel(scales, panels),
        mins=None if mins is None else _by_panel(mins, panels),
        table=packed_table,
        in_features=in_features,
        out_features=out_features,
        group_size=group_size,
        kind=kind,
        rounds_rows=rounds_rows,
    )


def with_super_scales(weight: PackedWeight, super_scales: Tensor, super_mins: Tensor | None) -> PackedWeight:
    """Return a weight whose 8-bit scales and minima are multiplied with ``[out_features, ceil(in_features / 256)]``.

    These are fp16. Raises ValueError if shapes do not fit together.
    """
    shape = (weight.out_features, -(-weight.in_features // SUPER_GROUP))
    for name, tensor in (("super_scales", super_scales), ("super_mins", super_mins)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}.")
    panels = len(weight.codes)
    by_panel = None if super_mins is None else _by_panel(super_mins, panels)
    return replace(weight, super_scales=_by_panel(super_scales, panels), super_mins=by_panel)


def codes_of(weight: PackedWeight) -> Tensor:
    """Return ``[out_features, in_features]`` uint8: the codes that ``pack`` packed."""
    panels, num_blocks = weight.codes.shape[:2]
    parts = weight.codes.unsqueeze(-1).view(torch.uint8).permute(0, 3, 1, 2, 4)  # [panels, lanes, blocks, words, bytes]
    if weight.table is not None:
        parts = torch.stack([parts & 15, parts >> 4], dim=-2)
    lanes = parts.reshape(panels * PANEL, num_blocks * weight.block_size)
    return lanes[: weight.out_features, : weight.in_features]


def part_of(weight: PackedWeight, outputs: slice, inputs: slice) -> PackedWeight:
    """Return some outputs and inputs of a weight, with the same codes and scales.

    Raises ValueError if a boundary of the inputs lies within a group, unless all of them do, if scales have two levels,
    or if nothing is left.
    """
    size = weight.group_size
    if outputs.start == outputs.stop or inputs.start == inputs.stop:
        raise ValueError("there are fewer of them than parts")
    first = inputs.start // size
    last = (inputs.stop - 1) // size
    is_cut = inputs.start % size or (inputs.stop % size and inputs.stop != weight.in_features)
    if is_cut and first != last:
        raise ValueError(f"inputs {inputs.start} to {inputs.stop} are not whole groups of {size}")
    if weight.super_scales is not None:
        raise ValueError("its scales have two levels")
    scales, mins = (None if each is None else each[outputs, first : last + 1] for each in scales_of(weight))
    assert scales is not None
    codes = codes_of(weight)[outputs, inputs]
    return pack(codes, scales, mins, weight.table, size, weight.kind, weight.rounds_rows)


def values_of(weight: PackedWeight) -> Tensor:
    """Return ``[out_features, in_features]`` fp32: the values of the codes, without scales."""
    codes = codes_of(weight)
    if weight.table is not None:
        return weight.table[codes.long()]
    return codes.view(torch.int8 if weight.kind == INT8 else torch.float8_e4m3fn).float()


def scales_of(weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Return ``[out_features, groups]`` of scales and of minima, in their dtype; of two levels the products in fp32."""
    scales, mins, super_scales, super_mins = (
        None if each is None else _by_output(each)[: weight.out_features]
        for each in (getattr(weight, name) for name in OF_GROUPS)
    )
    assert scales is not None
    if super_scales is not None:
        groups = SUPER_GROUP // weight.group_size
        scales = _products(scales, super_scales, groups)
        if mins is not None:
            assert super_mins is not None
            mins = _products(mins, super_mins, groups)
    return scales, mins


def _products(numbers: Tensor, supers: Tensor, groups: int) -> Tensor:
    return numbers.float() * supers.float().repeat_interleave(groups, dim=1)[:, : numbers.shape[1]]


def dequantized(weight: PackedWeight, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the weights ``[out_features, in_features]`` that the codes stand for."""
    scales, mins = scales_of(weight)
    size = weight.group_size
    each = scales.to(dtype).repeat_interleave(size, dim=1)[:, : weight.in_features]
    weights = values_of(weight).to(dtype) * each
    return weights if mins is None else weights + mins.to(dtype).repeat_interleave(size, dim=1)[:, : weight.in_features]


def _by_panel(numbers: Tensor, panels: int) -> Tensor:
    padded = pad(numbers, (0, 0, 0, panels * PANEL - len(numbers)))
    return padded.view(panels, PANEL, -1).transpose(1, 2).contiguous()


def _by_output(numbers: Tensor) -> Tensor:
    return numbers.transpose(1, 2).flatten(0, 1)
