"""``quantized_linear``: rows times weights of 8- or 4-bit codes; a row has the same bits alone and among others.

A program computes a tile of ``out^T = weight rows^T``. Blocks of inputs are dealt to ``_LANES`` lanes in turn, and a
warp computes the blocks of one lane: it multiplies the values of the codes by the inputs, multiplies the sums of the
products by the scales, and adds them to the lane's sums. At the end the lanes are added pair by pair.

Bytes: those of the weight, read from memory once for up to ``_MANY_ROWS`` rows (16 in fp32). With more rows, programs
that share weights run next to each other. Codes become values in registers. Grid: (tiles of outputs x groups of rows),
groups of rows fastest.

A row's bits depend on that row and the weights alone. The lanes, and so the order in which blocks are added, depend on
no size. Only ``tl.dot`` adds products of a block, in batches, which NVIDIA devices of all generations multiply with the
same instruction in tiles of all sizes. What follows is written as ``tl.fma``, so the compiler has no choice. Rows that
the weight rounds become 8-bit integers in a kernel of their own, whose products are exact.

16-bit rows are multiplied by values of their own dtype. Those of 8-bit codes are exact in it; entries of a table are
rounded to it, which loses nothing of int4 and mxfp4. A weight that rounds rows has a table of integers up to 127.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.quantization.packed_weight import OF_GROUPS, PANEL, PackedWeight
from specdec_fast.triton_kernels.byte_permutation import has_permute
from specdec_fast.triton_kernels.overlap import overlaps, wait
from specdec_fast.triton_kernels.quantized_linear_parts import FLOAT8, INT8, TABLE, registers_of_table, total_of_tile
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_LANES = 8  # sums of an output, each of every eighth block; as many as warps
_MANY_ROWS = 64
_STAGES = 6  # one more than the steps of eight blocks that are loaded ahead
STAGES_OF_AMD = 2  # its compiler refuses more for what is looked up at an address that it has just loaded
_FEW_STAGES = 3  # of tiles that would need more shared memory than the devices of NVIDIA with the least have
_WIDE = 8192  # outputs that are enough for programs of two panels
_ROUNDED_AT_ONCE = 2048  # numbers that a program rounds
_KINDS = {"int8": INT8.value, "float8_e4m3": FLOAT8.value, "table": TABLE.value}  # as in PackedWeight.kind
_LEAST_ROUNDED = tl.constexpr(2.0**-100)  # as in the oracle: a block of smaller numbers counts as zeros
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and subtracted, it rounds small numbers, half to even


@triton.jit(do_not_specialize=("num_rows", "stride_rows_row", "out_features", "has_bias"))
def _quantized_linear_kernel(
    rows,  # [T, IN_FEATURES], the last axis contiguous; 8-bit integers if ROUNDED
    steps,  # [T, blocks], what the integers are multiples of; read if ROUNDED
    codes,  # [panels, blocks, WORDS, 16]
    scales,  # [panels, groups, 16]
    mins,  # [panels, groups, 16]; read if HAS_MINS
    super_scales,  # [panels, supers, 16]; read if scales are integers
    super_mins,  # [panels, supers, 16]; read if scales are integers, and HAS_MINS
    table,  # [16]; read if KIND is TABLE
    bias,  # [out_features]; read if has_bias
    out,  # [T, out_features]
    num_rows,
    stride_rows_row,
    out_features,
    has_bias,
    IN_FEATURES: tl.constexpr,  # of whole blocks
    GROUP: tl.constexpr,  # blocks that share a scale
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_MINS: tl.constexpr,
    WORDS: tl.constexpr,  # of codes in a block
    SIZE: tl.constexpr,  # inputs of a block
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    LANES: tl.constexpr,
    PANEL: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_PERMUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    row_groups = tl.cdiv(num_rows, BLOCK_ROWS)
    tile = (tl.program_id(0) // row_groups).to(tl.int64)
    row = (tl.program_id(0) % row_groups).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    is_row = row < num_rows
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    is_output = output < out_features
    DTYPE: tl.constexpr = rows.dtype.element_ty
    PERMUTES: tl.constexpr = HAS_PERMUTE and KIND == TABLE and not DTYPE.is_fp32()
    registers = registers_of_table(table, DTYPE, PERMUTES)
    wait(OVERLAPS)
    total = total_of_tile(
        rows, steps, codes, scales, mins, super_scales, super_mins, table, registers, row, is_row, stride_rows_row,
        tile, out_features, IN_FEATURES, GROUP, KIND, ROUNDED, HAS_MINS, WORDS, SIZE, BLOCK_OUT, LANES, PANEL, STAGES,
        PERMUTES,
    )  # fmt: skip
    if has_bias != 0:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_at = out + (row * out_features)[:, None] + output[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty).T, mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=("in_features", "stride_rows_row"))
def _round_kernel(
    rows,  # [T, in_features], the last axis contiguous
    whole,  # [T, IN_FEATURES] int8
    steps,  # [T, blocks]
    in_features,
    stride_rows_row,
    IN_FEATURES: tl.constexpr,  # of whole blocks
    SIZE: tl.constexpr,  # inputs of a block
    BLOCK_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    BLOCKS: tl.constexpr = IN_FEATURES // SIZE
    PROGRAMS: tl.constexpr = (BLOCKS + BLOCK_BLOCKS - 1) // BLOCK_BLOCKS  # of a row
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    block = tl.program_id(0) % PROGRAMS * BLOCK_BLOCKS + tl.arange(0, BLOCK_BLOCKS)
    place = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]  # [BLOCK_BLOCKS, SIZE]
    wait(OVERLAPS)
    numbers = tl.load(rows + row * stride_rows_row + place, mask=place < in_features, other=0.0).to(tl.float32)
    magnitude = tl.abs(numbers)
    is_finite = tl.min((magnitude <= _LARGEST).to(tl.int32), axis=1) == 1  # comparisons with NaN are false
    largest = tl.max(tl.where(is_finite[:, None], magnitude, 0.0), axis=1)
    is_zero = largest < _LEAST_ROUNDED
    inverse = tl.where(is_zero, 0.0, tl.div_rn(127.0, tl.where(is_zero, 1.0, largest)))
    scaled = tl.fma(numbers, tl.broadcast_to(inverse[:, None], numbers.shape), 0.0)  # not one operation with the sum
    rounded = tl.where(is_finite[:, None], (scaled + _TO_WHOLE) - _TO_WHOLE, 0.0)
    step = tl.where(is_zero, 0.0, tl.div_rn(largest, 127.0))
    tl.store(whole + row * IN_FEATURES + place, rounded.to(tl.int8), mask=(block < BLOCKS)[:, None])
    tl.store(steps + row * BLOCKS + block, tl.where(is_finite, step, float("nan")), mask=block < BLOCKS)


@dataclass(frozen=True)
class PackedFormat:
    """What a kernel is compiled for, of a weight; its sizes come in addition."""

    kind: str
    block_size: int = 32
    group_size: int = 32
    has_mins: bool = False
    rounds_rows: bool = False


def format_of(weight: PackedWeight) -> PackedFormat:
    """Return the format of a weight."""
    return PackedFormat(weight.kind, weight.block_size, weight.group_size, weight.mins is not None, weight.rounds_rows)


def launch_of(form: PackedFormat, dtype: torch.dtype, in_features: int, out_features: int, num_rows: int) -> Launch:
    """Choose tiles: few rows share a program, and the programs of few outputs compute one panel each.

    Two panels halve how often rows are read; four would leave an H100 without enough programs. fp32 uses no tensor
    cores, and larger tiles would spill.
    """
    size = form.block_size
    is_many = num_rows > 16
    is_fp32 = dtype == torch.float32 and not form.rounds_rows
    many = 16 if is_fp32 else _MANY_ROWS
    is_wide = (is_many or out_features >= _WIDE) and not is_fp32
    stages = _FEW_STAGES if is_many or is_fp32 else _STAGES
    if torch.version.hip is not None:
        stages = STAGES_OF_AMD
    constexprs = {
        "IN_FEATURES": triton.cdiv(in_features, size) * size,
        "GROUP": form.group_size // size,
        "KIND": _KINDS[form.kind],
        "ROUNDED": form.rounds_rows,
        "HAS_MINS": form.has_mins,
        "WORDS": size // (8 if form.kind == "table" else 4),
        "SIZE": size,
        "BLOCK_ROWS": many if is_many else 8 if num_rows <= 8 else 16,
        "BLOCK_OUT": 32 if is_wide else 16,
        "LANES": _LANES,
        "PANEL": PANEL,
        "STAGES": stages,
        "HAS_PERMUTE": has_permute(),
        "OVERLAPS": overlaps(),
    }
    return Launch(constexprs, num_warps=_LANES, num_stages=stages, max_registers=255, instruction_side=16)


def _round_launch(num_blocks: int, size: int) -> Launch:
    at_once = _ROUNDED_AT_ONCE // size
    constexprs = {"IN_FEATURES": num_blocks * size, "SIZE": size, "BLOCK_BLOCKS": at_once, "OVERLAPS": overlaps()}
    return Launch(constexprs, num_warps=4)


def _rounded(rows: Tensor, num_blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Return ``[T, num_blocks * size]`` integers and the steps ``[T, num_blocks]`` that they are multiples of."""
    whole = torch.empty(len(rows), num_blocks * size, dtype=torch.int8, device=rows.device)
    steps = torch.empty(len(rows), num_blocks, dtype=torch.float32, device=rows.device)
    launch = _round_launch(num_blocks, size)
    programs = triton.cdiv(num_blocks, launch.constexprs["BLOCK_BLOCKS"])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _round_kernel[(len(rows) * programs,)](rows, whole, steps, rows.shape[1], rows.stride(0), **launch.options)
    return whole, steps


def _aligned(rows: Tensor, in_features: int) -> Tensor:
    """Return the rows with zeros up to ``in_features`` and the alignment that the kernel assumes, copied if need be."""
    if rows.shape[1] < in_features:
        return pad(rows, (0, in_features - rows.shape[1]))
    fits = rows.stride(1) == 1 and rows.stride(0) * rows.itemsize % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def numbers_of(rows: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return what a kernel multiplies, of whole blocks: integers and their steps, or the rows, which stand for both."""
    num_blocks = weight.codes.shape[-3]
    if weight.rounds_rows:
        return _rounded(rows, num_blocks, weight.block_size)
    numbers = _aligned(rows, num_blocks * weight.block_size)
    return numbers, numbers


def tensors_of(weight: PackedWeight) -> list[Tensor]:
    """Return codes, the tensors of ``OF_GROUPS`` and the table as a kernel takes them; scales stand for absent ones.

    Numbers of groups are aligned to 32 bits, as copies if need be.
    """
    found = [getattr(weight, name) for name in OF_GROUPS]
    given = [weight.scales if each is None else each for each in found]
    of_groups = [each if each.data_ptr() % 4 == 0 else each.clone() for each in given]
    return [weight.codes, *of_groups, of_groups[0] if weight.table is None else weight.table]


def quantized_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Launch the kernel, after the one that rounds the rows if the weight does; the contract is the oracle's."""
    num_rows = len(rows)
    out = torch.empty(num_rows, weight.out_features, dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    numbers, steps = numbers_of(rows, weight)
    launch = launch_of(format_of(weight), rows.dtype, weight.in_features, weight.out_features, num_rows)
    tiles = launch.constexprs
    num_tiles = triton.cdiv(weight.out_features, tiles["BLOCK_OUT"])
    _quantized_linear_kernel[(num_tiles * triton.cdiv(num_rows, tiles["BLOCK_ROWS"]),)](
        numbers,
        steps,
        *tensors_of(weight),
        out if bias is None else bias,
        out,
        num_rows,
        numbers.stride(0),
        weight.out_features,
        int(bias is not None),
        **launch.options,
    )
    return out


# What engines round to, and what checkpoints hold: names, formats and dtypes of scales.
_INT4 = PackedFormat("table")
_SHORT = PackedFormat("int8", block_size=16, group_size=16)
_USUAL = (
    ("int4", _INT4, torch.float16),
    ("int8", PackedFormat("int8"), torch.float16),
    ("int8_a8", PackedFormat("int8", rounds_rows=True), torch.float16),
    ("float8", PackedFormat("float8_e4m3", group_size=128), torch.float32),
    ("q4_k", replace(_INT4, has_mins=True), torch.int8),
    ("awq", replace(_INT4, has_mins=True), torch.float32),
)
_OTHERS = (
    ("int4_a8", replace(_INT4, rounds_rows=True), torch.float16),
    ("mxfp4", _INT4, torch.bfloat16),
    ("mxfp4_a8", replace(_INT4, rounds_rows=True), torch.bfloat16),
    ("nf4", replace(_INT4, group_size=64), torch.float32),
    ("q4_k_a8", replace(_INT4, has_mins=True, rounds_rows=True), torch.int8),
    ("awq_a8", replace(_INT4, group_size=128, has_mins=True, rounds_rows=True), torch.float16),
    ("q6_k", _SHORT, torch.int8),
    ("q6_k_a8", replace(_SHORT, rounds_rows=True), torch.int8),
)
_IN_ALL_TILES = ("int4", "int8", "int8_a8")
_MODELS = ((4096, 4096), (4096, 12_288))


def variants() -> Iterator[Variant]:
    """Yield the compilations: in bf16 all formats, three of them in all tiles; a few formats in other dtypes.

    So many take long to compile. Other tiles have the same arithmetic, and other dtypes the same codes.
    """
    integers = dict.fromkeys(("num_rows", "stride_rows_row", "out_features", "has_bias"), "i32")
    for dtype, kind in TYPE_NAMES.items():
        is_bf16 = dtype == torch.bfloat16
        for name, form, scale_dtype in (*_USUAL, *_OTHERS) if is_bf16 else _USUAL:
            pointers = pointers_of(form, kind, scale_dtype)
            for suffix, launch in _tiles(form, dtype, is_bf16 and name in _IN_ALL_TILES).items():
                full = f"{kind}_{name}_{suffix}"
                yield launch.variant(full, _quantized_linear_kernel, pointers | integers, tuple(pointers))
        signature = {"rows": f"*{kind}", "whole": "*i8", "steps": "*fp32"}
        signature |= dict.fromkeys(("in_features", "stride_rows_row"), "i32")
        for size in (32, 16) if is_bf16 else (32,):
            launch = _round_launch(4096 // size, size)
            yield launch.variant(f"{kind}_round_{size}", _round_kernel, signature, ("rows", "whole", "steps"))
            yield launch.variant(f"{kind}_round_{size}_unaligned", _round_kernel, signature, ("whole", "steps"))


def pointers_of(form: PackedFormat, kind: str, scale_dtype: torch.dtype) -> dict[str, str]:
    """Return the types of the pointers to rows, weights and results, for rows of a type and scales of a dtype."""
    scale = "*i8" if scale_dtype == torch.int8 else f"*{TYPE_NAMES[scale_dtype]}"
    pointers = dict.fromkeys(("rows", "steps", "bias", "out"), f"*{kind}")
    pointers |= {"codes": "*i32", "scales": scale, "mins": scale}
    pointers |= {"super_scales": "*fp16", "super_mins": "*fp16" if form.has_mins else scale}
    pointers |= {} if scale == "*i8" else {"super_scales": scale, "super_mins": scale}
    pointers["table"] = "*fp32" if form.kind == "table" else scale
    return pointers | ({"rows": "*i8", "steps": "*fp32"} if form.rounds_rows else {})


def _tiles(form: PackedFormat, dtype: torch.dtype, has_all: bool) -> dict[str, Launch]:
    """Return the launches to list for a format, by the names of their tiles."""
    found = {}
    for in_features, out_features in _MODELS if has_all else _MODELS[:1]:
        for num_rows in (8, 16, 1 << 20) if has_all else (8,):
            launch = launch_of(form, dtype, in_features, out_features, num_rows)
            found[f"{launch.constexprs['BLOCK_OUT']}x{launch.constexprs['BLOCK_ROWS']}"] = launch
    return found
