"""``linear``: few rows times a weight matrix; a row has the same bits alone and among others.

Bytes: ``out_features * in_features * itemsize`` of weights, read from memory once, because programs that share weights
run together, and all but the first find them in the cache. A program reads ``in_features * itemsize`` for each of its
rows, usually from the cache; outputs are written once. Grid: (tiles of outputs x tiles of rows), tiles of rows fastest.

A row's bits depend on that row and the weights alone. One program adds up a whole sum, in the order of the features,
and rounds once. All tiles have the same height, padded with zeros. Their other sizes depend on the type and the
features, and no argument of the rows is specialised. So the same compiled kernel computes any number of rows, and only
the place of a row in its tile differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_BLOCK_ROWS = 16  # the height of a tensor core's operand; most verify steps have few more rows
_ENOUGH_PROGRAMS = 96  # each loads at least 24 KiB of weights at a time, so many saturate a large device
_UNSPECIALISED = ("num_rows", "stride_rows_row")  # specialised by them, other rows would get another kernel


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _linear_kernel(
    rows,  # [T, IN_FEATURES], the last axis contiguous
    weight,  # [out_features, IN_FEATURES], contiguous
    bias,  # [out_features]; read if HAS_BIAS
    out,  # [T, out_features], contiguous
    num_rows,
    stride_rows_row,
    out_features,
    IN_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    row_tile, out_tile = (tl.program_id(0) % row_tiles).to(tl.int64), (tl.program_id(0) // row_tiles).to(tl.int64)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    output = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    row_at = rows + tl.multiple_of(row * stride_rows_row, ALIGNMENT)[:, None]
    weight_at = weight + (output * IN_FEATURES)[:, None]
    row_mask, weight_mask = (row < num_rows)[:, None], (output < out_features)[:, None]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in range(0, IN_FEATURES, BLOCK_IN):
        feature = first + tl.arange(0, BLOCK_IN)[None, :]  # [1, BLOCK_IN]
        if IN_FEATURES % BLOCK_IN == 0:
            inputs = tl.load(row_at + feature, mask=row_mask, other=0.0)
            weights = tl.load(weight_at + feature, mask=weight_mask, other=0.0)
        else:
            inputs = tl.load(row_at + feature, mask=row_mask & (feature < IN_FEATURES), other=0.0)
            weights = tl.load(weight_at + feature, mask=weight_mask & (feature < IN_FEATURES), other=0.0)
        sums = tl.dot(inputs, weights.T, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < out_features, other=0.0).to(tl.float32)[None, :]
    out_at = out + (row * out_features)[:, None] + output[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=row_mask & (output < out_features)[None, :])


def _launch(dtype: torch.dtype, in_features: int, out_features: int, has_bias: bool) -> Launch:
    """Choose tiles and warps. They define a row's bits, so the choice does not depend on the rows.

    Few outputs get narrow tiles, so that enough programs run to use the whole bandwidth. With 16-bit numbers a warp
    computes at least 8 outputs, so a narrow tile has work for two warps. fp32 uses no tensor cores.
    """
    block_out = next((size for size in (64, 32) if size * _ENOUGH_PROGRAMS <= out_features), 16)
    narrow = block_out == 16
    constexprs = {
        "IN_FEATURES": in_features,
        "HAS_BIAS": has_bias,
        "ALIGNMENT": _alignment(dtype, in_features),
        "BLOCK_ROWS": _BLOCK_ROWS,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": (512 if narrow else 256) // dtype.itemsize,
    }
    num_warps = 2 if narrow and dtype != torch.float32 else 4
    # Four stages load three tiles of weights ahead; the shared memory of an AMD device has room for fewer.
    return Launch(constexprs, num_warps, num_stages=4 if torch.version.hip is None else 2)


def _alignment(dtype: torch.dtype, in_features: int) -> int:
    """Return how many numbers are 16 bytes if a row of weights is a multiple of 16 bytes, else 1."""
    return 16 // dtype.itemsize if in_features * dtype.itemsize % 16 == 0 else 1


def _aligned(rows: Tensor, alignment: int) -> Tensor:
    """Return the rows with the alignment that the compiled kernel assumes, as a copy if necessary."""
    fits = rows.stride(1) == 1 and rows.stride(0) % alignment == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the kernel; the contract is the oracle's."""
    (num_rows, in_features), out_features = rows.shape, weight.shape[0]
    out = torch.empty(num_rows, out_features, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    launch = _launch(rows.dtype, in_features, out_features, bias is not None)
    rows = _aligned(rows, launch.constexprs["ALIGNMENT"])
    num_tiles = triton.cdiv(num_rows, _BLOCK_ROWS) * triton.cdiv(out_features, launch.constexprs["BLOCK_OUT"])
    _linear_kernel[(num_tiles,)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        rows.stride(0),
        out_features,
        **launch.options,
    )
    return out


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type: every width of tile, a tail of features, a bias, unaligned rows."""
    pointers = ("rows", "weight", "bias", "out")
    for dtype, kind in TYPE_NAMES.items():
        signature = dict.fromkeys(pointers, f"*{kind}")
        signature |= dict.fromkeys(("num_rows", "stride_rows_row", "out_features"), "i32")
        for in_features, out_features, has_bias in (
            (2048, 1024, False),
            (896, 896, True),
            (1024, 3072, False),
            (1024, 151_936, False),
            (2100, 50_257, False),
        ):
            launch = _launch(dtype, in_features, out_features, has_bias)
            name = f"{kind}_{in_features}x{out_features}{'_bias' * has_bias}"
            aligned = (*pointers, "out_features") if out_features % 16 == 0 else pointers
            yield launch.variant(name, _linear_kernel, signature, aligned)
        launch = _launch(dtype, 67, 33, has_bias=True)
        yield launch.variant(f"{kind}_unaligned", _linear_kernel, signature, pointers)
        launch = _launch(dtype, 67, 1, has_bias=True)  # Triton treats an integer that is 1 as a constant
        launch = replace(launch, constexprs={**launch.constexprs, "out_features": 1})
        one = {name: kind for name, kind in signature.items() if name != "out_features"}
        yield launch.variant(f"{kind}_one_output_unaligned", _linear_kernel, one, pointers)
