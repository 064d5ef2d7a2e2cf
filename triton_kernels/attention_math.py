"""The arithmetic of ``paged_attention``: small functions that its kernels share, so that their bits are equal.

Every product that is then added uses ``tl.fma``. A compiler that may fuse ``a * b + c`` could do so in one kernel and
not in another, and the two would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(x):
    """Return for each number whether it is finite: neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def empty_state(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return (sums [ROWS, DIMS], maximum [ROWS], total [ROWS]) of a softmax over no entries."""
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    return sums, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def shift_of(maximum):
    """Return what to subtract before exp2: the maximum, or 0 for an empty state (-inf - -inf would be NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def merge(sums, maximum, total, later_sums, later_maximum, later_total):
    """Combine two softmax states; an empty state does not change the other one."""
    both = tl.maximum(maximum, later_maximum)
    weight = tl.exp2(maximum - shift_of(both))
    later_weight = tl.exp2(later_maximum - shift_of(both))
    total = tl.fma(total, weight, later_total * later_weight)
    sums = tl.fma(sums, weight[:, None], later_sums * later_weight[:, None])
    return sums, both, total


@triton.jit
def with_sink(sums, maximum, total, sink):
    """Combine a softmax state with sink scores [ROWS], in units of log 2, which have no values."""
    both = tl.maximum(maximum, sink)
    weight = tl.exp2(maximum - shift_of(both))
    total = tl.fma(total, weight, tl.exp2(sink - shift_of(both)))
    return sums * weight[:, None], total


@triton.jit
def normalised(sums, total):
    """Divide by the total, [ROWS, DIMS]; if a row has seen an entry that is not finite, all its columns become NaN.

    The sums may have a NaN in one column or in all columns, depending on whether the entry's tile is hidden from a
    neighbouring row. The result must not depend on that. Adding +0 makes zeros positive, because their sign depends on
    the tiles that were skipped.
    """
    inverse = 1.0 / total
    out = tl.fma(sums, inverse[:, None], 0.0)
    spoilt = tl.max(tl.where(finite(out), 0, 1), axis=1)
    return tl.where((spoilt > 0)[:, None], float("nan"), out)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent in fp32 within a few ulp, by the same operations on every device.

    Near 0, where 1 - 2 / (e^2x + 1) would cancel, it is an odd polynomial (coefficients of the Cephes library, tanhf).
    """
    square = x * x
    series = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    series = tl.fma(series, square, -5.37397155531e-2)
    series = tl.fma(series, square, 1.33314422036e-1)
    series = tl.fma(series, square, -3.33332819422e-1)
    near = tl.fma(series * square, x, x)
    magnitude = tl.abs(x)
    inverse = 1.0 / (tl.exp2(magnitude * (2 * _LOG2_E)) + 1.0)
    far = tl.fma(inverse, -2.0, 1.0)
    return tl.where(magnitude < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def popcount(word):
    """Count the set bits of an int32, all 32 of them."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF
