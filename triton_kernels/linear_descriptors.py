"""``linear`` for many rows on Hopper: the device copies whole tiles of weights and rows by their descriptors.

Threads compute no addresses and hold none, so a tile can be 128 outputs by 256 rows. A tile of 192 rows is a product
with 128 and one with 64. The sums are those of ``linear``: the same products in the same order. A descriptor is a
parameter of the launch, so nothing is allocated, and a graph keeps it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec_fast.triton_kernels.linear_parts import with_products
from specdec_fast.triton_kernels.overlap import wait
from specdec_fast.triton_kernels.variant import Launch

_SECOND = 64  # rows of the second product of a tile of 192
_KEPT = ("IN_FEATURES", "BLOCK_ROWS", "BLOCK_OUT", "BLOCK_IN", "OVERLAPS")  # choices of a launch of ``linear``


@triton.jit
def _store(out, sums, bias, output, first, num_rows, out_features, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr):
    row = (first + tl.arange(0, COUNT)).to(tl.int64)
    inside = output < out_features
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_at = out + (row * out_features)[:, None] + output[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty).T, mask=(row < num_rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("num_rows",))
def descriptor_kernel(
    rows,  # descriptor of [T, IN_FEATURES], with tiles of the first rows of a tile
    second,  # the same with tiles of SECOND rows; read if there are any
    weight,  # descriptor of [out_features, IN_FEATURES]
    bias,  # [out_features]; read if HAS_BIAS
    out,  # [T, out_features], contiguous
    num_rows,
    out_features,
    IN_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SECOND: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``BLOCK_OUT`` outputs and ``BLOCK_ROWS`` rows. Grid: as that of ``linear``.

    There is one matrix: a program that chose a descriptor would copy it to the memory of each of its threads, and loops
    for several matrices would not share their shared memory.
    """
    FIRST: tl.constexpr = BLOCK_ROWS - SECOND
    groups = tl.cdiv(num_rows, BLOCK_ROWS)
    begin = tl.program_id(0) // groups * BLOCK_OUT
    first = tl.program_id(0) % groups * BLOCK_ROWS
    wait(OVERLAPS)
    sums = tl.zeros([BLOCK_OUT, FIRST], tl.float32)
    others = tl.zeros([BLOCK_OUT, FIRST if SECOND == 0 else SECOND], tl.float32)
    for feature in range(0, IN_FEATURES, BLOCK_IN):
        weights = weight.load([begin, feature])
        sums = with_products(sums, weights, rows.load([first, feature]))
        if SECOND > 0:
            others = with_products(others, weights, second.load([first + FIRST, feature]))
    output = begin.to(tl.int64) + tl.arange(0, BLOCK_OUT)
    _store(out, sums, bias, output, first, num_rows, out_features, HAS_BIAS, FIRST)
    if SECOND > 0:
        _store(out, others, bias, output, first + FIRST, num_rows, out_features, HAS_BIAS, SECOND)


def with_descriptors(launch: Launch, has_bias: bool) -> Launch:
    """Return the launch of ``descriptor_kernel`` in the tiles of a launch of ``linear``."""
    kept = {name: launch.constexprs[name] for name in _KEPT}
    second = _SECOND if kept["BLOCK_ROWS"] == 192 else 0
    # The barriers of the copies are in shared memory, too: a stage that would just fit does not.
    stages = min(launch.num_stages, 4)
    constexprs = {**kept, "HAS_BIAS": has_bias, "SECOND": second}
    return replace(launch, constexprs=constexprs, num_stages=stages, instruction_side=None)


def multiply(launch: Launch, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the kernel in the tiles of ``launch``; rows and weights begin at multiples of 16 bytes."""
    launch = with_descriptors(launch, bias is not None)
    tile = launch.constexprs
    second = tile["SECOND"]

    def described(tensor: Tensor, height: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], [height, tile["BLOCK_IN"]])

    heights = (tile["BLOCK_ROWS"] - second, second or tile["BLOCK_ROWS"])
    descriptors = (*(described(rows, height) for height in heights), described(weight, tile["BLOCK_OUT"]))
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    num_programs = triton.cdiv(len(weight), tile["BLOCK_OUT"]) * triton.cdiv(len(rows), tile["BLOCK_ROWS"])
    arguments = (*descriptors, weight if bias is None else bias, out, len(rows), len(weight))
    descriptor_kernel[(num_programs,)](*arguments, **launch.options)
    return out
