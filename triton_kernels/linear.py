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
and rounds once; no sum is split between programs. The number of rows and of outputs determines the tiles
(``linear_tiles``), and so the instruction that multiplies them. Ampere has one instruction for all tiles, and AMD
devices get one. On Hopper several do, and they give the same bits: ``make gpu-check`` compares them, and an engine
compares the logits of its model when it is made. fp32 is multiplied without tensor cores: a program adds up
``BLOCK_IN`` products, and then adds the sums. No argument of the rows is specialised.

On Hopper another kernel, ``linear_descriptors``, computes the same sums of many rows where it is faster.

On Hopper and later, a program asks for its first weights while the kernel before it still runs: see ``overlap``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.triton_kernels.linear_descriptors import multiply
from specdec_fast.triton_kernels.linear_parts import matrix_of, with_products
from specdec_fast.triton_kernels.linear_tiles import are_faster_alone, described_launch, launch_of
from specdec_fast.triton_kernels.overlap import prefetch_rows, wait
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Launch, Variant

T = TypeVar("T")
MAX_WEIGHTS = 3  # matrices of one launch
_PREFETCHED = tl.constexpr(256)  # numbers of each row of weights for which a program asks before it waits
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(num_rows, BLOCK_ROWS)
    weight, bias, out, out_features, tile = matrix_of(
        tl.program_id(0) // groups, (weight_0, weight_1, weight_2), (bias_0, bias_1, bias_2), out,
        (out_features_0, out_features_1, out_features_2), num_rows.to(tl.int64), NUM_WEIGHTS, BLOCK_OUT,
    )  # fmt: skip
    output = tile.to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    weight_at = weight + (output * IN_FEATURES)[:, None]
    weight_mask = (output < out_features)[:, None]
    if OVERLAPS:
        prefetch_rows(weight, output, out_features, IN_FEATURES, _PREFETCHED)
    wait(OVERLAPS)
    row = (tl.program_id(0) % groups).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_at = rows + tl.multiple_of(row * stride_rows_row, ALIGNMENT)[:, None]
    row_mask = (row < num_rows)[:, None]
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first in range(0, IN_FEATURES, BLOCK_IN):
        feature = first + tl.arange(0, BLOCK_IN)[None, :]  # [1, BLOCK_IN]
        inside = (feature < IN_FEATURES) | (IN_FEATURES % BLOCK_IN == 0)
        weights = tl.load(weight_at + feature, mask=weight_mask & inside, other=0.0)
        inputs = tl.load(row_at + feature, mask=row_mask & inside, other=0.0)
        sums = with_products(sums, weights, inputs)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < out_features, other=0.0).to(tl.float32)[:, None]
    out_at = out + (row * out_features)[:, None] + output[None, :]
    mask = row_mask & (output < out_features)[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty).T, mask=mask)


def aligned(rows: Tensor, alignment: int) -> Tensor:
    """Return the rows with the alignment that the compiled kernel assumes, as a copy if necessary."""
    fits = rows.stride(1) == 1 and rows.stride(0) % alignment == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _with(launch: Launch, num_weights: int, has_bias: bool) -> Launch:
    return replace(launch, constexprs={**launch.constexprs, "NUM_WEIGHTS": num_weights, "HAS_BIAS": has_bias})


def _filled(given: Sequence[T]) -> list[T]:
    """Return arguments for ``MAX_WEIGHTS`` matrices; the kernel does not read the added ones."""
    return [*given, *(given[0] for _ in range(MAX_WEIGHTS - len(given)))]


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch a kernel; the contract is the oracle's."""
    launch = described_launch(rows.dtype, rows.shape[1], len(weight), len(rows))
    if launch is None or weight.data_ptr() % 16 or len(weight) == 0:
        return linears(rows, [weight], None if bias is None else [bias])[0]
    return multiply(launch, aligned(rows, launch.constexprs["ALIGNMENT"]), weight, bias)


def linears(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Multiply the same rows with several matrices, in one launch or, where that is faster, in a launch for each.

    Each result has the bits that ``linear`` gives it.

    Args:
        rows: ``[T, in_features]``.
        weights: 1 to ``MAX_WEIGHTS`` matrices ``[out_features_i, in_features]``, contiguous.
        biases: ``[out_features_i]`` for each matrix, or None. Results are ``[T, out_features_i]``, contiguous.
    """
    (num_rows, in_features) = rows.shape
    sizes = [len(weight) for weight in weights]
    if are_faster_alone(rows.dtype, in_features, sizes, num_rows):
        own = biases or [None] * len(weights)
        return [linear(rows, weight, bias) for weight, bias in zip(weights, own, strict=True)]
    out = torch.empty(num_rows * sum(sizes), dtype=rows.dtype, device=rows.device)
    pieces = out.split([num_rows * size for size in sizes])
    outs = [piece.view(num_rows, size) for piece, size in zip(pieces, sizes, strict=True)]
    if out.numel() == 0:
        return outs
    launch = _with(launch_of(rows.dtype, in_features, sizes, num_rows), len(weights), biases is not None)
    blocks = launch.constexprs
    rows = aligned(rows, blocks["ALIGNMENT"])
    num_tiles = sum(triton.cdiv(size, blocks["BLOCK_OUT"]) for size in sizes)
    _linear_kernel[(num_tiles * triton.cdiv(num_rows, blocks["BLOCK_ROWS"]),)](
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
                tile = launch.constexprs
                launched = _with(launch, len(sizes), has_bias)
                suffix = f"{tile['BLOCK_OUT']}x{tile['BLOCK_ROWS']}"
                yield launched.variant(f"{name}_{suffix}", _linear_kernel, signature, aligned)
        (launch,) = _launches(dtype, 67, (33,))
        yield _with(launch, 1, True).variant(f"{kind}_unaligned", _linear_kernel, signature, _POINTERS)
        launch = _with(launch, 1, True)  # Triton treats an integer that is 1 as a constant
        launch = replace(launch, constexprs={**launch.constexprs, **dict.fromkeys(_SIZES, 1)})
        one = {name: kind for name, kind in signature.items() if name not in _SIZES}
        yield launch.variant(f"{kind}_one_output_unaligned", _linear_kernel, one, _POINTERS)


def _launches(dtype: torch.dtype, in_features: int, sizes: Sequence[int]) -> list[Launch]:
    """Return the launches for all numbers of rows."""
    launches = [launch_of(dtype, in_features, sizes, num_rows) for num_rows in (16, 64, 128, 1 << 20)]
    tiles = {(each.constexprs["BLOCK_OUT"], each.constexprs["BLOCK_ROWS"]): each for each in launches}
    return list(tiles.values())
