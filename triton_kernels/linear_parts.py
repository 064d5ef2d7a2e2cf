"""Parts of the kernels that multiply rows with matrices, so that a sum has the same products in the same order."""

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
def with_products(sums, weights, inputs):
    """Add the products of a tile of weights ``[BLOCK_OUT, BLOCK_IN]`` and one of inputs ``[BLOCK_ROWS, BLOCK_IN]``."""
    if weights.dtype == tl.float32:
        # Not a plain sum: Triton would give it to the product, which then adds its terms to it one by one.
        sums = tl.fma(tl.dot(weights, inputs.T, input_precision="ieee"), 1.0, sums)
    else:
        sums = tl.dot(weights, inputs.T, sums)
    return sums
