"""The op ``quantized_linear``: rows times a weight matrix of 8- or 4-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.ops.checks import FLOATS, expect, expect_tensor
from specdec_fast.ops.registry import Op
from specdec_fast.quantization.packed_weight import (
    INT8,
    KINDS,
    PANEL,
    SCALE_DTYPES,
    SUPER_GROUP,
    TABLE,
    TABLE_SIZE,
    PackedWeight,
    scales_of,
    values_of,
)

LARGEST_WHOLE = 127  # entries of a table for rounded rows, whose products with them are those of 8-bit integers
LEAST_ROUNDED = 2.0**-100  # a block whose largest magnitude is smaller counts as zeros: its scale has no inverse


def quantized_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by quantised weights: ``[T, out_features]`` in the dtype of ``rows``.

    Of every block of inputs, an output adds ``scale * sum(value * x) + minimum * sum(x)``, block after block in fp32;
    the total, with the bias, is rounded once. A row has the same bits alone and among others, in every implementation.

    If ``weight.rounds_rows``, ``x`` is the row rounded block by block to ``step * q``, where ``step`` is the largest
    magnitude over 127 and ``q`` an integer, half to even; the sums over a block are exact integers then. A block with a
    number that is not finite makes all outputs of its row NaN.

    Args:
        rows: ``[T, in_features]`` of fp32, fp16 or bf16.
        weight: see :class:`~specdec_fast.quantization.packed_weight.PackedWeight`.
        bias: ``[out_features]`` of the dtype of ``rows``, or None.
    """
    size = weight.block_size
    num_blocks = weight.codes.shape[1]
    missing = num_blocks * size - weight.in_features
    values = pad(values_of(weight), (0, missing)).view(-1, num_blocks, size)
    per_group = weight.group_size // size
    scales, mins = (
        None if each is None else each.float().repeat_interleave(per_group, dim=1)[:, :num_blocks]
        for each in scales_of(weight)
    )
    assert scales is not None
    blocks = pad(rows.float(), (0, missing)).view(-1, num_blocks, size)
    if weight.rounds_rows:
        blocks, steps = rounded_blocks(blocks)
        products = torch.einsum("obi,tbi->tbo", values, blocks)  # exact in any order
        scaled = products * steps[..., None]
        sums = steps * blocks.sum(dim=2)
    else:  # row by row, because PyTorch sums in another order for another number of rows
        each = [torch.einsum("obi,bi->bo", values, row.clone()) for row in blocks]
        scaled = torch.stack(each) if each else blocks.new_empty(0, num_blocks, weight.out_features)
        sums = torch.stack([row.clone().sum(dim=1) for row in blocks]) if each else blocks.new_empty(0, num_blocks)
    total = scaled.new_zeros(len(rows), weight.out_features)
    for b in range(num_blocks):
        total = total + scales[:, b] * scaled[:, b]
        if mins is not None:
            total = total + mins[:, b] * sums[:, b, None]
    return (total if bias is None else total + bias).to(rows.dtype)


def rounded_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Round fp32 ``[..., blocks, size]`` to whole numbers up to 127, times steps ``[..., blocks]``; return both."""
    largest = blocks.abs().amax(dim=-1)
    is_zero = largest < LEAST_ROUNDED
    is_finite = torch.isfinite(blocks).all(dim=-1)
    quotients = torch.full_like(largest, 127) / largest  # 127 / largest multiplies by a rounded reciprocal
    inverse = torch.where(is_zero | ~is_finite, 0.0, quotients)
    whole = torch.where(is_finite[..., None], blocks * inverse[..., None], 0.0).round()
    steps = torch.where(is_zero, 0.0, largest / 127)
    return whole, torch.where(is_finite, steps, torch.nan)


def _check(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    expect_tensor("rows", rows, (None, weight.in_features), FLOATS, rows.device)
    check_packed(weight, rows.device)
    if bias is not None:
        expect_tensor("bias", bias, (weight.out_features,), (rows.dtype,), rows.device)
        expect(bias.is_contiguous(), "bias must be contiguous.")


def check_packed(weight: PackedWeight, device: torch.device) -> None:
    """Raise ValueError unless the tensors of a packed weight have the shapes that its sizes ask for."""
    expect(weight.kind in KINDS, f"kind is {weight.kind!r}; expected one of {', '.join(KINDS)}.")
    expect((weight.table is not None) == (weight.kind == TABLE), f"a table of values belongs to kind {TABLE!r} alone.")
    expect(weight.in_features > 0 and weight.out_features > 0, "the weight has no inputs or no outputs.")
    panels = -(-weight.out_features // PANEL)
    expect_tensor("codes", weight.codes, (panels, None, None, PANEL), (torch.int32,), device)
    size = weight.block_size
    expect(size in (16, 32), f"a block has {size} inputs; expected 16 or 32.")
    num_blocks = -(-weight.in_features // size)
    expect_tensor("codes", weight.codes, (panels, num_blocks, None, PANEL), (torch.int32,), device)
    expect(
        weight.group_size > 0 and weight.group_size % size == 0,
        f"group_size is {weight.group_size}; expected a multiple of {size}, the inputs of a block.",
    )
    num_groups = -(-weight.in_features // weight.group_size)
    has_levels = weight.super_scales is not None
    scale_dtypes = (torch.int8,) if has_levels else SCALE_DTYPES
    expect_tensor("scales", weight.scales, (panels, num_groups, PANEL), scale_dtypes, device)
    if weight.mins is not None:
        expect_tensor("mins", weight.mins, (panels, num_groups, PANEL), (weight.scales.dtype,), device)
    has_super_mins = weight.super_mins is not None
    expect(has_super_mins == (has_levels and weight.mins is not None), "super_mins belong to mins and super_scales.")
    for name in ("super_scales", "super_mins"):
        if (supers := getattr(weight, name)) is not None:
            num_supers = -(-weight.in_features // SUPER_GROUP)
            expect_tensor(name, supers, (panels, num_supers, PANEL), (torch.float16,), device)
            expect(
                SUPER_GROUP % weight.group_size == 0,
                f"group_size is {weight.group_size}; expected a divisor of {SUPER_GROUP}, the inputs of a super-scale.",
            )
    if weight.table is not None:
        expect_tensor("table", weight.table, (TABLE_SIZE,), (torch.float32,), device)
    expect(all(each.is_contiguous() for each in weight.tensors), "the tensors of a packed weight must be contiguous.")
    expect(
        not weight.rounds_rows or weight.kind in (INT8, TABLE),
        f"rows are rounded for whole numbers only, not for kind {weight.kind!r}.",
    )
    if weight.rounds_rows and weight.table is not None and device.type == "cpu":  # on a device it would wait
        is_whole = (
            bool((weight.table == weight.table.round()).all()) and float(weight.table.abs().max()) <= LARGEST_WHOLE
        )
        expect(is_whole, f"rows are rounded for whole numbers up to {LARGEST_WHOLE} only; the table has others.")


OP = Op(
    name="quantized_linear",
    implementations={
        "torch": "specdec_fast.ops.quantized_linear:quantized_linear",
        "cpp": "specdec_fast.ops.cpp:quantized_linear",
        "triton": "specdec_fast.triton_kernels.quantized_linear:quantized_linear",
    },
    check=_check,
    exact=False,
    invariant=frozenset({"torch", "cpp", "triton"}),
)
