"""Kernels that start while the kernel before them still runs (programmatic dependent launch, from Hopper on).

A launch and the beginning of a program take about as long as the work of a small kernel. So a kernel lets the next one
start at once. The next one computes addresses, may prefetch weights into the L2 cache, and then waits until all
programs of the kernel before have ended and what they wrote can be read. Every such kernel waits before it reads what
another kernel wrote, and before it writes, so no two kernels that depend on one another overlap. A kernel that was not
launched like this, such as one of PyTorch's, begins when the kernel before it has ended, as usual.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from specdec_fast.triton_kernels.device import properties

FIRST_ARCH = 90  # the number of Hopper, as in sm_90
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_LINE = tl.constexpr(128)  # bytes of a line of the L2 cache


def overlaps() -> bool:
    """Return whether kernels of the current device may overlap."""
    device = None if _INTERPRETING else properties()
    return device is not None and 10 * device.major + device.minor >= FIRST_ARCH


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(matrix, row, num_rows, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """Ask for the first ``FIRST`` numbers of rows of a contiguous matrix [num_rows, SIZE] in the L2 cache."""
    STEP: tl.constexpr = _LINE // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = FIRST // STEP
    column = tl.minimum(tl.arange(0, LINES) * STEP, SIZE - 1)
    address = matrix + (tl.minimum(row, num_rows - 1) * SIZE)[:, None] + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
