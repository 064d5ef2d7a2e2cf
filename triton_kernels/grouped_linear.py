"""``grouped_linear``: every row times the weights of the experts chosen for it.

Bytes: ``out_features * in_features * itemsize`` of weights for each expert that is chosen for a row. A program computes
a tile of outputs of one product. Products of one expert run next to each other, so that all but the first find the
tile's weights in the cache. The kernel is meant for the few rows of a verification; the rows of a prompt would need a
tile of rows as well.

A row's bits depend on that row and the weights alone: a program computes one row, and its tiles do not depend on the
number of rows. The kernel does not check expert ids; they come from a ``topk``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

_TILE = 2048  # weights that a program of four warps loads at a time


@triton.jit(do_not_specialize=["num_products"])
def _grouped_linear_kernel(
    rows,  # [num_vectors, IN_FEATURES], contiguous: a vector per product, or one per NUM_CHOICES products
    expert_ids,  # [num_products]
    order,  # [num_products], sorts the products by expert
    weight,  # [experts, out_features, IN_FEATURES], or with the last two axes exchanged
    bias,  # [experts, out_features]; read if HAS_BIAS
    out,  # [num_products, out_features]
    num_products,
    out_features,
    IN_FEATURES: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    product = tl.load(order + tl.program_id(0) % num_products)
    tile = (tl.program_id(0) // num_products).to(tl.int64)
    expert = tl.load(expert_ids + product)
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    inputs_at = rows + product // NUM_CHOICES * IN_FEATURES
    weight_at = weight + expert * out_features * IN_FEATURES
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for first in range(0, IN_FEATURES, BLOCK_IN):
        feature = first + tl.arange(0, BLOCK_IN)  # [BLOCK_IN]
        inputs = tl.load(inputs_at + feature, mask=feature < IN_FEATURES, other=0.0).to(tl.float32)
        if TRANSPOSED:
            at = output[:, None] + feature[None, :] * out_features
        else:
            at = output[:, None] * IN_FEATURES + feature[None, :]
        mask = (output < out_features)[:, None] & (feature < IN_FEATURES)[None, :]
        sums += tl.load(weight_at + at, mask=mask, other=0.0).to(tl.float32) * inputs[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + expert * out_features + output, mask=output < out_features, other=0.0).to(tl.float32)
    tl.store(out + product * out_features + output, total.to(out.dtype.element_ty), mask=output < out_features)


def _launch(dtype: torch.dtype, in_features: int, num_choices: int, is_transposed: bool, has_bias: bool) -> Launch:
    """Choose tiles: vectors of 128 bytes along the axis on which weights are contiguous."""
    contiguous = 128 // dtype.itemsize
    others = _TILE // contiguous
    constexprs = {
        "IN_FEATURES": in_features,
        "NUM_CHOICES": num_choices,
        "TRANSPOSED": is_transposed,
        "HAS_BIAS": has_bias,
        "BLOCK_OUT": contiguous if is_transposed else others,
        "BLOCK_IN": others if is_transposed else contiguous,
    }
    return Launch(constexprs, num_warps=4, num_stages=2)


def grouped_linear(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the kernel; the contract is the oracle's, except that expert ids are not checked."""
    (_, num_vectors, in_features) = rows.shape
    num_choices = expert_ids.shape[1]
    out_features = weight.shape[1]
    out = torch.empty(*expert_ids.shape, out_features, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    products_per_vector = num_choices if num_vectors == 1 else 1
    launch = _launch(rows.dtype, in_features, products_per_vector, not weight.is_contiguous(), bias is not None)
    num_products = expert_ids.numel()
    num_tiles = triton.cdiv(out_features, launch.constexprs["BLOCK_OUT"])
    _grouped_linear_kernel[(num_tiles * num_products,)](
        rows.contiguous(),
        expert_ids,
        expert_ids.flatten().argsort(),
        weight,
        weight if bias is None else bias,
        out,
        num_products,
        out_features,
        **launch.options,
    )
    return out


def variants() -> Iterator[Variant]:
    """Yield the compilations for each type: gate and up, down, exchanged axes with a bias, odd sizes."""
    pointers = ("rows", "expert_ids", "order", "weight", "bias", "out")
    for dtype, kind in TYPE_NAMES.items():
        signature = dict.fromkeys(pointers, f"*{kind}") | {"expert_ids": "*i64", "order": "*i64"}
        signature |= dict.fromkeys(("num_products", "out_features"), "i32")
        for name, in_features, products_per_vector, is_transposed, has_bias, is_aligned in (
            ("2048_of_8", 2048, 8, False, False, True),
            ("768", 768, 1, False, False, True),
            ("2880_of_4_transposed_bias", 2880, 4, True, True, True),
            ("67_bias_unaligned", 67, 1, False, True, False),
            ("67_transposed_unaligned", 67, 1, True, False, False),
            ("67_transposed_bias_unaligned", 67, 1, True, True, False),
        ):
            launch = _launch(dtype, in_features, products_per_vector, is_transposed, has_bias)
            divisible = (*pointers, "out_features") if is_aligned else pointers
            yield launch.variant(f"{kind}_{name}", _grouped_linear_kernel, signature, divisible)
        launch = _launch(dtype, 67, 1, False, False)  # Triton treats an integer that is 1 as a constant
        launch = replace(launch, constexprs={**launch.constexprs, "out_features": 1})
        one = {name: kind for name, kind in signature.items() if name != "out_features"}
        yield launch.variant(f"{kind}_one_output_unaligned", _grouped_linear_kernel, one, pointers)
