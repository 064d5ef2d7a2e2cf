"""Kernels that start while the kernel before them still runs (programmatic dependent launch, from Hopper on).

A launch and the beginning of a program take about as long as the work of a small kernel. So a kernel lets the next one
start at once. The next one computes addresses, may prefetch weights into the L2 cache, and then waits until all
programs of the kernel before have ended and what they wrote can be read. Every such kernel waits before it reads what
another kernel wrote, and before it writes, so no two kernels that depend on one another overlap. A kernel that was not
launched like this, such as one of PyTorch's, begins when the kernel before it has ended, as usual.

A program lets the next kernel start after it has waited, or, with ``TRIGGER_FIRST``, before. Then kernel N + 2 may
start while kernel N runs: when all programs of N + 1 have begun. This is as safe. N + 2 waits until N + 1 has ended,
and no program of N + 1 ends before N has, because each waits. So what N + 2 reads or writes after its wait, N no longer
uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl

from specdec_fast.triton_kernels.device import properties

FIRST_ARCH = 90  # the number of Hopper, as in sm_90
WAIT_FIRST = 1
TRIGGER_FIRST = 2
_TRIGGER_FIRST = tl.constexpr(TRIGGER_FIRST)
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_LINE = tl.constexpr(128)  # bytes of a line of the L2 cache


_CHOSEN = {"order": WAIT_FIRST}


def overlaps() -> int:
    """Return how kernels of the current device overlap: ``WAIT_FIRST``, ``TRIGGER_FIRST``, or 0 if they may not."""
    device = None if _INTERPRETING else properties()
    return 0 if device is None else order_of(10 * device.major + device.minor)


def order_of(arch: int) -> int:
    """Return what ``overlaps`` returns on devices of this number, such as 90 for sm_90."""
    return _CHOSEN["order"] if arch >= FIRST_ARCH else 0


@contextmanager
def ordered(order: int) -> Iterator[None]:
    """Choose ``WAIT_FIRST`` or ``TRIGGER_FIRST`` for launches within, and for programs that are made within."""
    before = _CHOSEN["order"]
    _CHOSEN["order"] = order
    try:
        yield
    finally:
        _CHOSEN["order"] = before


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start; ``OVERLAPS`` is what ``overlaps`` returned."""
    if OVERLAPS == _TRIGGER_FIRST:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(matrix, row, num_rows, SIZE: tl.constexpr, FIRST: tl.constexpr, begin=0):
    """Ask for ``FIRST`` numbers from ``begin`` on of rows of a contiguous matrix [num_rows, SIZE] in the L2 cache."""
    STEP: tl.constexpr = _LINE // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = FIRST // STEP
    column = tl.minimum(begin + tl.arange(0, LINES) * STEP, SIZE - 1)
    address = matrix + (tl.minimum(row, num_rows - 1) * SIZE)[:, None] + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
