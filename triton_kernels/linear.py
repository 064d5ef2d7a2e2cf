"""``linear``: few rows times a weight matrix, so that a row has the same bits alone and among others.

Bytes: ``out_features * in_features * itemsize`` of weights, read from memory once: programs that share them run
together, and all but the first find them in the cache. A program reads ``in_features * itemsize`` for each of its rows,
from the cache as a rule; outputs are written once. Grid: (tiles of outputs x tiles of rows), tiles of rows fastest.

A row's bits depend on that row and the weights alone. Whole sums are added up by one program, in order of the features,
and rounded once. Tiles have one height, filled up with zeros; their other sizes go by the type and the features, and
nothing of the rows is specialised. So the same compiled kernel serves any number of rows, and all that differs is where
in its tile a row stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_BLOCK_ROWS = 16  # what a tensor core takes; most verify steps have not many more
_ENOUGH_PROGRAMS = 96  # each has 24 KiB or more of weights under way: what a large device moves while one load waits
_UNSPECIALISED = ("num_rows", "stride_rows_row")  # a kernel specialised by them would be another for other rows


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
    """Choose tiles and warps: by nothing of the rows, for they define a row's bits.

    Few outputs are cut into narrow tiles, so that there are programs enough to draw on the whole bandwidth. Of 16-bit
    numbers a warp takes 8 outputs at least, so a narrow tile has work for two; fp32 goes without tensor cores.
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
    # Four stages keep three tiles of weights under way; the shared memory of an AMD device has room for fewer.
    return Launch(constexprs, num_warps, num_stages=4 if torch.version.hip is None else 2)


def _alignment(dtype: torch.dtype, in_features: int) -> int:
    """Return how many numbers make 16 bytes, if a row of weights is a whole multiple of that, else 1."""
    return 16 // dtype.itemsize if in_features * dtype.itemsize % 16 == 0 else 1


def _aligned(rows: Tensor, alignment: int) -> Tensor:
    """Return the rows so that, whichever they are, the kernel may read them in the same way."""
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
    """Yield what is launched of each type: every width of tile, a tail of features, a bias, rows off 16 bytes."""
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
        launch = _launch(dtype, 67, 1, has_bias=True)  # Triton takes a number that is 1 for known when compiling
        launch = replace(launch, constexprs={**launch.constexprs, "out_features": 1})
        one = {name: kind for name, kind in signature.items() if name != "out_features"}
        yield launch.variant(f"{kind}_one_output_unaligned", _linear_kernel, one, pointers)
