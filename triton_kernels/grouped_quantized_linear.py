"""``grouped_quantized_linear``: every row times the quantised weights of the experts chosen for it.

Products are sorted by expert. A program computes a tile of outputs of one *group*: the products of one expert within a
stretch of ``BLOCK_ROWS`` sorted products that begins at a multiple of it. It is the tile that ``quantized_linear``
computes, by the same functions, with rows that lie anywhere.

Bytes: those of the weights of each expert that is chosen for a row, read from memory once: groups of one expert run
next to each other, and all but the first find the tile's weights in the cache. Grid: (tiles of outputs x places where a
group may begin), places fastest; a program of a place where none begins returns.

A row's bits depend on that row and the weights of its expert alone, and are those that ``quantized_linear`` gives it:
no order of sums depends on the tile, so neither on the other rows of its group nor on other experts. The kernel does
not check expert ids; they come from a ``topk``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.quantization.packed_weight import PackedWeight
from specdec_fast.triton_kernels.overlap import wait
from specdec_fast.triton_kernels.quantized_linear import (
    PackedFormat,
    format_of,
    launch_of,
    numbers_of,
    pointers_of,
    tensors_of,
)
from specdec_fast.triton_kernels.quantized_linear_parts import TABLE, registers_of_table, total_of_tile
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_INTEGERS = (
    "num_products", "num_places", "num_listed", "spacing", "products_per_vector", "stride_rows_row", "out_features",
    "has_bias",
)  # fmt: skip


@triton.jit
def _group_of(
    place, sorted_ids, firsts, num_products, num_listed, spacing, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Return the sorted product and the expert of a place where a group may begin, and whether one begins there."""
    if place < num_listed:
        position = (place * spacing).to(tl.int64)
        expert = tl.load(sorted_ids + position)
        before = tl.load(sorted_ids + position - 1, mask=position > 0, other=-1)
        begins = (position % BLOCK_ROWS == 0) | (before != expert)
    else:
        position = tl.load(firsts + place - num_listed)
        expert = tl.load(sorted_ids + position, mask=position < num_products, other=-1)
        begins = (position % BLOCK_ROWS != 0) & (expert == place - num_listed)
    return position, expert, begins


@triton.jit(do_not_specialize=_INTEGERS)
def _grouped_quantized_linear_kernel(
    rows,  # [num_vectors, IN_FEATURES], the last axis contiguous; 8-bit integers if ROUNDED
    steps,  # [num_vectors, blocks], what the integers are multiples of; read if ROUNDED
    sorted_ids,  # [num_products], the experts of all products, ascending
    order,  # [num_products], the product of each
    firsts,  # [experts], the first sorted product of each expert; read if there are more places than num_listed
    codes,  # [experts, panels, blocks, WORDS, 16]
    scales,  # [experts, panels, groups, 16]
    mins,  # [experts, panels, groups, 16]; read if HAS_MINS
    super_scales,  # [experts, panels, supers, 16]; read if scales are integers
    super_mins,  # [experts, panels, supers, 16]; read if scales are integers, and HAS_MINS
    table,  # [16]; read if KIND is TABLE
    bias,  # [experts, out_features]; read if has_bias
    out,  # [num_products, out_features]
    num_products,
    num_places,  # where a group may begin
    num_listed,  # of these, the sorted products 0, spacing, 2 * spacing and so on; others are those of ``firsts``
    spacing,
    products_per_vector,
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
    tile = (tl.program_id(0) // num_places).to(tl.int64)
    wait(OVERLAPS)
    first, expert, begins = _group_of(
        tl.program_id(0) % num_places, sorted_ids, firsts, num_products, num_listed, spacing, BLOCK_ROWS
    )
    if not begins:
        return
    DTYPE: tl.constexpr = rows.dtype.element_ty
    PERMUTES: tl.constexpr = HAS_PERMUTE and KIND == TABLE and not DTYPE.is_fp32()
    registers = registers_of_table(table, DTYPE, PERMUTES)
    position = first + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    inside = (position < num_products) & (position // BLOCK_ROWS == first // BLOCK_ROWS)
    is_row = inside & (tl.load(sorted_ids + position, mask=inside, other=-1) == expert)
    product = tl.load(order + position, mask=is_row, other=0)
    BLOCKS: tl.constexpr = IN_FEATURES // SIZE
    GROUPS: tl.constexpr = (BLOCKS + GROUP - 1) // GROUP
    SUPERS: tl.constexpr = (IN_FEATURES + 255) // 256
    panels = expert * tl.cdiv(out_features, PANEL)  # before those of the expert
    total = total_of_tile(
        rows, steps, codes + panels * (BLOCKS * WORDS * PANEL), scales + panels * (GROUPS * PANEL),
        mins + panels * (GROUPS * PANEL), super_scales + panels * (SUPERS * PANEL),
        super_mins + panels * (SUPERS * PANEL), table, registers, product // products_per_vector, is_row,
        stride_rows_row, tile, out_features, IN_FEATURES, GROUP, KIND, ROUNDED, HAS_MINS, WORDS, SIZE, BLOCK_OUT, LANES,
        PANEL, STAGES, PERMUTES,
    )  # fmt: skip
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    is_output = output < out_features
    if has_bias != 0:
        total += tl.load(bias + expert * out_features + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_at = out + (product * out_features)[:, None] + output[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty).T, mask=is_row[:, None] & is_output[None, :])


def _launch(
    form: PackedFormat, dtype: torch.dtype, sizes: tuple[int, int], num_products: int, num_experts: int
) -> Launch:
    """Choose the tiles of ``quantized_linear`` for twice the rows that an expert has on average.

    They are as wide as for a matrix with the outputs of all experts that may have rows.
    """
    in_features, out_features = sizes
    rows_each = triton.cdiv(2 * num_products, num_experts)
    return launch_of(form, dtype, in_features, out_features * min(num_products, num_experts), rows_each)


def _places(sorted_ids: Tensor, num_experts: int, block_rows: int) -> tuple[int, int, int, Tensor | None]:
    """Return the number of places where groups may begin, the number and spacing of those listed, and the others.

    Every product is such a place, unless there are so many that the multiples of ``block_rows`` and the first products
    of experts are fewer.
    """
    num_products = len(sorted_ids)
    num_blocks = triton.cdiv(num_products, block_rows)
    if num_blocks + num_experts >= num_products:
        return num_products, num_products, 1, None
    experts = torch.arange(num_experts, device=sorted_ids.device)
    return num_blocks + num_experts, num_blocks, block_rows, torch.searchsorted(sorted_ids, experts)


def grouped_quantized_linear(
    rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """Launch the kernel, after the one that rounds the rows if the weight does.

    The contract is the oracle's, except that expert ids are not checked.
    """
    (_, num_vectors, in_features) = rows.shape
    out = torch.empty(*expert_ids.shape, weight.out_features, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    numbers, steps = numbers_of(rows.reshape(-1, in_features), weight)
    num_products = expert_ids.numel()
    num_experts = len(weight.codes)
    sizes = (in_features, weight.out_features)
    launch = _launch(format_of(weight), rows.dtype, sizes, num_products, num_experts)
    sorted_ids, order = expert_ids.flatten().sort()
    num_places, num_listed, spacing, firsts = _places(sorted_ids, num_experts, launch.constexprs["BLOCK_ROWS"])
    num_tiles = triton.cdiv(weight.out_features, launch.constexprs["BLOCK_OUT"])
    _grouped_quantized_linear_kernel[(num_tiles * num_places,)](
        numbers,
        steps,
        sorted_ids,
        order,
        order if firsts is None else firsts,
        *tensors_of(weight),
        out if bias is None else bias,
        out,
        num_products,
        num_places,
        num_listed,
        spacing,
        expert_ids.shape[1] if num_vectors == 1 else 1,
        numbers.stride(0),
        weight.out_features,
        int(bias is not None),
        **launch.options,
    )
    return out


# What engines round experts to, and what checkpoints hold: names, formats and dtypes of scales.
_INT4 = PackedFormat("table")
_INT8 = PackedFormat("int8")
_SHORT = PackedFormat("int8", block_size=16, group_size=16)
_USUAL = (
    ("int4", _INT4, torch.float16),
    ("int8_a8", replace(_INT8, rounds_rows=True), torch.float16),
    ("q4_k", replace(_INT4, has_mins=True), torch.int8),
)
_OTHERS = (
    ("int8", _INT8, torch.float16),
    ("int4_a8", replace(_INT4, rounds_rows=True), torch.float16),
    ("float8", PackedFormat("float8_e4m3", group_size=128), torch.float32),
    ("mxfp4", _INT4, torch.bfloat16),
    ("awq", replace(_INT4, group_size=128, has_mins=True), torch.float16),
    ("awq_a8", replace(_INT4, group_size=128, has_mins=True, rounds_rows=True), torch.float16),
    ("short", _SHORT, torch.float32),
    ("q6_k_a8", replace(_SHORT, rounds_rows=True), torch.int8),
)
_LAYER = (2048, 1536)  # gate and up of Qwen3-30B-A3B, with 8 of 128 experts


def variants() -> Iterator[Variant]:
    """Yield the compilations: in bf16 all formats, int4 in all tiles; a few formats in other dtypes.

    So many take long to compile. Other tiles have the same arithmetic, and other dtypes the same codes.
    """
    places = dict.fromkeys(("sorted_ids", "order", "firsts"), "*i64")
    integers = dict.fromkeys(_INTEGERS, "i32")
    for dtype, kind in TYPE_NAMES.items():
        is_bf16 = dtype == torch.bfloat16
        for name, form, scale_dtype in (*_USUAL, *_OTHERS) if is_bf16 else _USUAL:
            pointers = places | pointers_of(form, kind, scale_dtype)
            for suffix, launch in _tiles(form, dtype, is_bf16 and name == "int4").items():
                full = f"{kind}_{name}_{suffix}"
                yield launch.variant(full, _grouped_quantized_linear_kernel, pointers | integers, tuple(pointers))


def _tiles(form: PackedFormat, dtype: torch.dtype, has_all: bool) -> dict[str, Launch]:
    """Return the launches to list for a format, by the names of their tiles."""
    found = {}
    for num_products in (8, 8 * 128, 1 << 20) if has_all else (8,):
        launch = _launch(form, dtype, _LAYER, num_products, 128)
        found[f"{launch.constexprs['BLOCK_OUT']}x{launch.constexprs['BLOCK_ROWS']}"] = launch
    return found
