"""``linear``: few rows times a weight matrix; a row has the same bits alone and among others.

A program computes tiles of ``out^T = weight rows^T``: outputs are the tall side of a product on tensor cores, rows the
wide side, of which there may be few. ``linears`` multiplies the same rows with up to three matrices in one launch, as a
layer does for queries, keys and values, or for gate and up. The matrices stay where they are, and their outputs have
the bits that ``linear`` gives them.

Bytes: ``out_features * in_features * itemsize`` of weights, read from memory once for up to 64 rows, because one
program computes all of them. With more rows, programs that share weights run next to each other, and all but the first
find them in the cache. (Where a row of weights is no multiple of 16 bytes, a program computes 16 rows.) A program reads
``in_features * itemsize`` for each of its rows, usually from the cache; outputs are written once. Grid: (tiles of
outputs x groups of rows), groups of rows fastest.

A row's bits depend on that row and the weights alone. One program adds up a whole sum, in the order of the features,
and rounds once; no sum is split between programs. Rows are multiplied in blocks of 16. The number of rows determines
only how many blocks share the weights that a program has loaded: 1, 4 or 8, each a compilation of its own. The
instructions that multiply a block depend on the type and on whether the matrix has enough outputs for high tiles
(``has_high_tiles``), and not on the number of blocks. The two heights of low tiles have the same instruction and the
same steps through the features, so they give the same bits. No argument of the rows is specialised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

T = TypeVar("T")
MAX_WEIGHTS = 3  # matrices of one launch
_BLOCK_ROWS = 16  # rows of one product on tensor cores
_NUM_BLOCKS = (1, 4, 8)  # of a program; the second are the rows of most verifications, the third serves prompts
_ENOUGH_PROGRAMS = 96  # each loads at least 24 KiB of weights at a time, so many saturate a large device
_HIGH = 64  # outputs of a high tile
_UNSPECIALISED = ("num_rows", "stride_rows_row")  # specialised by them, other rows would get another kernel


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _linear_kernel(
    rows,  # [T, IN_FEATURES], the last axis contiguous
    weight_0, weight_1, weight_2,  # [out_features_i, IN_FEATURES], contiguous; the first NUM_WEIGHTS are read
    bias_0, bias_1, bias_2,  # [out_features_i]; read if HAS_BIAS
    out,  # [T, out_features_0], then [T, out_features_1] and so on, contiguous
    num_rows,
    stride_rows_row,
    out_features_0, out_features_1, out_features_2,
    IN_FEATURES: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(num_rows, BLOCK_ROWS * NUM_BLOCKS)
    weight, bias, out, out_features, tile = _matrix_of(
        tl.program_id(0) // groups, (weight_0, weight_1, weight_2), (bias_0, bias_1, bias_2), out,
        (out_features_0, out_features_1, out_features_2), num_rows.to(tl.int64), NUM_WEIGHTS, BLOCK_OUT,
    )  # fmt: skip
    output = tile.to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    weight_at, weight_mask = weight + (output * IN_FEATURES)[:, None], (output < out_features)[:, None]
    first_row = (tl.program_id(0) % groups).to(tl.int64) * (BLOCK_ROWS * NUM_BLOCKS) + tl.arange(0, BLOCK_ROWS)
    sums = ()  # of each block [BLOCK_OUT, BLOCK_ROWS]
    for _ in tl.static_range(NUM_BLOCKS):
        sums += (tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32),)
    for first in range(0, IN_FEATURES, BLOCK_IN):
        feature = first + tl.arange(0, BLOCK_IN)[None, :]  # [1, BLOCK_IN]
        inside = (feature < IN_FEATURES) | (IN_FEATURES % BLOCK_IN == 0)
        weights = tl.load(weight_at + feature, mask=weight_mask & inside, other=0.0)
        later = ()
        for block in tl.static_range(NUM_BLOCKS):
            row = first_row + block * BLOCK_ROWS
            row_at = rows + tl.multiple_of(row * stride_rows_row, ALIGNMENT)[:, None]
            inputs = tl.load(row_at + feature, mask=(row < num_rows)[:, None] & inside, other=0.0)
            later += (tl.dot(weights, inputs.T, sums[block], input_precision="ieee"),)
        sums = later
    for block in tl.static_range(NUM_BLOCKS):
        row, result = first_row + block * BLOCK_ROWS, sums[block]
        if HAS_BIAS:
            result += tl.load(bias + output, mask=output < out_features, other=0.0).to(tl.float32)[:, None]
        out_at = out + (row * out_features)[:, None] + output[None, :]
        mask = (row < num_rows)[:, None] & (output < out_features)[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty).T, mask=mask)


@triton.jit
def _matrix_of(
    tile, weights, biases, out, sizes, num_rows, NUM_WEIGHTS: tl.constexpr, BLOCK_OUT: tl.constexpr
):  # fmt: skip
    """Return weights, bias, results and outputs of the matrix of a tile of outputs, and the tile within it."""
    weight, bias, out_at, out_features, place = weights[0], biases[0], out, sizes[0], tile
    if NUM_WEIGHTS > 1:
        begin = tl.cdiv(sizes[0], BLOCK_OUT)
        if tile >= begin:
            weight, bias, out_features, place = weights[1], biases[1], sizes[1], tile - begin
            out_at = out + num_rows * sizes[0]
    if NUM_WEIGHTS > 2:
        begin += tl.cdiv(sizes[1], BLOCK_OUT)
        if tile >= begin:
            weight, bias, out_features, place = weights[2], biases[2], sizes[2], tile - begin
            out_at = out + num_rows * (sizes[0] + sizes[1])
    return weight, bias, out_at, out_features, place


def has_high_tiles(dtype: torch.dtype, out_features: int) -> bool:
    """Return whether a matrix is multiplied in high tiles; other instructions than those of low tiles compute them."""
    return dtype != torch.float32 and out_features >= _HIGH * _ENOUGH_PROGRAMS


def _launch(dtype: torch.dtype, in_features: int, sizes: Sequence[int], num_rows: int) -> Launch:
    """Choose tiles and warps for matrices of these outputs. Only the number of blocks depends on the rows.

    Few outputs get low tiles, so that enough programs run to use the whole bandwidth. Splitting their sums instead
    would need a second launch, which takes longer than reading so few weights. With 16-bit numbers a warp computes at
    least 8 outputs, so a low tile has work for two warps. fp32 uses no tensor cores; higher tiles would spill.
    """
    is_fp32, alignment = dtype == torch.float32, _alignment(dtype, in_features)
    block_out = 32 if sum(sizes) >= 32 * _ENOUGH_PROGRAMS else 16
    if has_high_tiles(dtype, sizes[0]):
        block_out = _HIGH
    most = 1 if alignment == 1 else 4 if is_fp32 or block_out == 16 else 8  # as many as do not spill
    num_blocks = next(n for n in _NUM_BLOCKS if n == most or num_rows <= n * _BLOCK_ROWS)
    constexprs = {
        "IN_FEATURES": in_features,
        "ALIGNMENT": alignment,
        "NUM_BLOCKS": num_blocks,
        "BLOCK_ROWS": _BLOCK_ROWS,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": 64 if is_fp32 else 128,
    }
    # Four warps would spill a tile of 32 x 64.
    num_warps = 2 if not is_fp32 and (block_out == 16 or (block_out, num_blocks) == (32, 4)) else 4
    return Launch(constexprs, num_warps, _num_stages(is_fp32, block_out, num_blocks))


def _num_stages(is_fp32: bool, block_out: int, num_blocks: int) -> int:
    """Return how many tiles of weights are loaded ahead. Blocks of rows take the same shared memory; AMD has less."""
    is_small = block_out == 16 and not is_fp32  # half of the bytes of the other tiles
    if torch.version.hip is not None:
        return 3 if is_small else 2
    return {1: 7, 4: 5}[num_blocks] if is_small else {1: 4, 4: 3, 8: 2}[num_blocks]


def _alignment(dtype: torch.dtype, in_features: int) -> int:
    """Return how many numbers are 16 bytes if a row of weights is a multiple of 16 bytes, else 1."""
    return 16 // dtype.itemsize if in_features * dtype.itemsize % 16 == 0 else 1


def _aligned(rows: Tensor, alignment: int) -> Tensor:
    """Return the rows with the alignment that the compiled kernel assumes, as a copy if necessary."""
    fits = rows.stride(1) == 1 and rows.stride(0) % alignment == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _with(launch: Launch, num_weights: int, has_bias: bool) -> Launch:
    return replace(launch, constexprs={**launch.constexprs, "NUM_WEIGHTS": num_weights, "HAS_BIAS": has_bias})


def _filled(given: Sequence[T]) -> list[T]:
    """Return arguments for ``MAX_WEIGHTS`` matrices; the kernel does not read the added ones."""
    return [*given, *(given[0] for _ in range(MAX_WEIGHTS - len(given)))]


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the kernel; the contract is the oracle's."""
    return linears(rows, [weight], None if bias is None else [bias])[0]


def linears(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Multiply the same rows with several matrices in one launch; each result has the bits that ``linear`` gives it.

    Args:
        rows: ``[T, in_features]``.
        weights: 1 to ``MAX_WEIGHTS`` matrices ``[out_features_i, in_features]``, contiguous; ``has_high_tiles`` is the
            same for all of them.
        biases: ``[out_features_i]`` for each matrix, or None.

    Returns:
        ``[T, out_features_i]`` for each matrix, contiguous.

    """
    (num_rows, in_features), sizes = rows.shape, [len(weight) for weight in weights]
    out = torch.empty(num_rows * sum(sizes), dtype=rows.dtype, device=rows.device)
    pieces = out.split([num_rows * size for size in sizes])
    outs = [piece.view(num_rows, size) for piece, size in zip(pieces, sizes, strict=True)]
    if out.numel() == 0:
        return outs
    launch = _with(_launch(rows.dtype, in_features, sizes, num_rows), len(weights), biases is not None)
    blocks = launch.constexprs
    rows = _aligned(rows, blocks["ALIGNMENT"])
    num_tiles = sum(triton.cdiv(size, blocks["BLOCK_OUT"]) for size in sizes)
    _linear_kernel[(num_tiles * triton.cdiv(num_rows, blocks["BLOCK_ROWS"] * blocks["NUM_BLOCKS"]),)](
        rows,
        *_filled(weights),
        *_filled(biases or weights),
        out,
        num_rows,
        rows.stride(0),
        *_filled(sizes),
        **launch.options,
    )
    return outs


_POINTERS = ("rows", "weight_0", "weight_1", "weight_2", "bias_0", "bias_1", "bias_2", "out")
_SIZES = ("out_features_0", "out_features_1", "out_features_2")
# Features, outputs of each matrix, bias.
_USUAL = (
    (2048, (1024,), False),
    (896, (896,), True),
    (1024, (3072,), False),
    (1024, (151_936,), False),
    (2100, (50_257,), False),
    (1024, (2048, 1024, 1024), False),
    (896, (896, 128, 128), True),
    (4096, (4096, 1024, 1024), False),
    (4096, (12_288, 12_288), False),
)


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type: heights of tiles, numbers of blocks and of matrices, a tail, a bias."""
    for dtype, kind in TYPE_NAMES.items():
        signature = dict.fromkeys(_POINTERS, f"*{kind}")
        signature |= dict.fromkeys(("num_rows", "stride_rows_row", *_SIZES), "i32")
        for in_features, sizes, has_bias in _USUAL:
            aligned = (*_POINTERS, *_SIZES) if all(size % 16 == 0 for size in sizes) else _POINTERS
            name = f"{kind}_{in_features}x{'_'.join(map(str, sizes))}{'_bias' * has_bias}"
            for launch in _launches(dtype, in_features, sizes):
                blocks, launched = launch.constexprs["NUM_BLOCKS"], _with(launch, len(sizes), has_bias)
                yield launched.variant(f"{name}_{blocks}", _linear_kernel, signature, aligned)
        (launch,) = _launches(dtype, 67, (33,))
        yield _with(launch, 1, True).variant(f"{kind}_unaligned", _linear_kernel, signature, _POINTERS)
        launch = _with(launch, 1, True)  # Triton treats an integer that is 1 as a constant
        launch = replace(launch, constexprs={**launch.constexprs, **dict.fromkeys(_SIZES, 1)})
        one = {name: kind for name, kind in signature.items() if name not in _SIZES}
        yield launch.variant(f"{kind}_one_output_unaligned", _linear_kernel, one, _POINTERS)


def _launches(dtype: torch.dtype, in_features: int, sizes: Sequence[int]) -> list[Launch]:
    """Return the launches for all numbers of rows."""
    launches = [_launch(dtype, in_features, sizes, blocks * _BLOCK_ROWS) for blocks in _NUM_BLOCKS]
    return list({launch.constexprs["NUM_BLOCKS"]: launch for launch in launches}.values())
