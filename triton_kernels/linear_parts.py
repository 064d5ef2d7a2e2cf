"""Parts of the kernels that multiply rows with matrices: that of ``linear``, and those that row operations join.

The kernels of fused linears are generated (``program/triton/linear_kernel.py``). They call the same functions as the
kernel of ``linear``, so a sum has the same products in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matrix_of(
    tile, weights, biases, out, sizes, num_rows, NUM_WEIGHTS: tl.constexpr, BLOCK_OUT: tl.constexpr
):  # fmt: skip
    """Return weights, bias, results and outputs of the matrix of a tile of outputs, and the tile within it."""
    weight = weights[0]
    bias = biases[0]
    out_at = out
    out_features = sizes[0]
    place = tile
    if NUM_WEIGHTS > 1:
        begin = tl.cdiv(sizes[0], BLOCK_OUT)
        if tile >= begin:
            weight = weights[1]
            bias = biases[1]
            out_features = sizes[1]
            place = tile - begin
            out_at = out + num_rows * sizes[0]
    if NUM_WEIGHTS > 2:
        begin += tl.cdiv(sizes[1], BLOCK_OUT)
        if tile >= begin:
            weight = weights[2]
            bias = biases[2]
            out_features = sizes[2]
            place = tile - begin
            out_at = out + num_rows * (sizes[0] + sizes[1])
    return weight, bias, out_at, out_features, place


@triton.jit
def pair_of(first, second, BLOCK_OUT: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return a pointer for each row of a tile that belongs to two matrices: 8 rows of one, 8 of the other, and so on.

    Both are multiples of ``ALIGNMENT`` bytes; ``tl.where`` hides this from the compiler.

    An instruction for 16 rows gives a thread the sums of rows i and i + 8, so a thread has both sums of an output.
    """
    return tl.multiple_of(tl.where(tl.arange(0, BLOCK_OUT) % 16 < 8, first, second), ALIGNMENT)


@triton.jit
def outputs_of_pair(tile, BLOCK_OUT: tl.constexpr):
    """Return the output that each row of such a tile computes, ``[BLOCK_OUT]``."""
    place = tl.arange(0, BLOCK_OUT)
    return tile.to(tl.int64) * (BLOCK_OUT // 2) + place // 16 * 8 + place % 8


@triton.jit
def sums_of_pair(sums, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the sums of each matrix, ``[BLOCK_OUT / 2, BLOCK_ROWS]``."""
    parts = sums.reshape(BLOCK_OUT // 16, 2, 8, BLOCK_ROWS).permute(0, 2, 3, 1)
    first, second = parts.split()
    return first.reshape(BLOCK_OUT // 2, BLOCK_ROWS), second.reshape(BLOCK_OUT // 2, BLOCK_ROWS)


@triton.jit
def with_products(sums, weights, inputs):
    """Add the products of a tile of weights ``[BLOCK_OUT, BLOCK_IN]`` and one of inputs ``[BLOCK_ROWS, BLOCK_IN]``."""
    if weights.dtype == tl.float32:
        # Not a plain sum: Triton would give it to the product, which then adds its terms to it one by one.
        sums = tl.fma(tl.dot(weights, inputs.T, input_precision="ieee"), 1.0, sums)
    else:
        sums = tl.dot(weights, inputs.T, sums)
    return sums


@triton.jit
def load_rows(
    pointer, row_at, mask, SIZE: tl.constexpr, COUNT: tl.constexpr, LENGTH: tl.constexpr, OF_THREADS: tl.constexpr,
    WARP_SIZE: tl.constexpr,
):  # fmt: skip
    """Return ``SIZE`` numbers of ``COUNT`` rows in fp32, and zeros up to a power of two, ``[COUNT, LENGTH]``.

    A *piece* is what all warps of the row's own kernel load in one instruction. Loaded as ``[pieces, COUNT, piece]``,
    each piece is spread over as many warps as there, and the other warps load other rows. So a sum over a row keeps
    its order.

    Args:
        pointer: to the first number of row 0.
        row_at, mask: where each row begins and which there are, ``[COUNT, 1]``.
        SIZE, COUNT, LENGTH: see above.
        OF_THREADS: numbers of a piece that threads of the same place in all warps load.
        WARP_SIZE: threads of a warp.
    """
    PIECE: tl.constexpr = min(LENGTH, OF_THREADS * WARP_SIZE)
    place = tl.arange(0, LENGTH // PIECE)[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    inside = mask[None, :, :]
    if SIZE != LENGTH:
        inside = inside & (place < SIZE)
    numbers = tl.load(pointer + row_at[None, :, :] + place, mask=inside, other=0.0).to(tl.float32)
    return numbers.permute(1, 0, 2).reshape(COUNT, LENGTH)


@triton.jit
def collected(part, values, group, COUNT: tl.constexpr, NUM: tl.constexpr):
    """Return ``values [NUM]`` with those of a group of ``COUNT`` rows, ``part [COUNT, 1]``.

    ``tl.gather`` also ends the layout of the sums: otherwise the compiler would use it for all that follows, where
    every thread would have all rows.
    """
    row = tl.arange(0, NUM)
    return tl.where(row // COUNT == group, tl.gather(part.reshape(COUNT), row % COUNT, 0), values)
