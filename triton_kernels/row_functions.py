"""The functions of row operations that Triton lacks, or computes less exactly, on fp32 numbers.

The formulas are those of ``csrc/program/row_functions.cpp``, but for sine and cosine, which are computed in fp64.
Kernels that call them are compiled without fusion of products and sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(2.12194440e-4)


@triton.jit
def exp_of(x):
    """Return e^x: 2^n by its bits, in two factors so that no exponent overflows, times a polynomial."""
    bounded = tl.where(x < -104.0, -104.0, x)
    bounded = tl.where(bounded > 89.0, 89.0, bounded)
    shifted = bounded * 1.44269504 + 12582912.0  # rounds to a whole number, in the low bits
    n = shifted - 12582912.0
    r = (bounded - n * _LN2_HIGH) + n * _LN2_LOW
    e = r * 1.98412698e-4 + 1.38888889e-3
    e = e * r + 8.33333333e-3
    e = e * r + 4.16666667e-2
    e = e * r + 1.66666667e-1
    e = e * r + 0.5
    e = e * r + 1.0
    e = e * r + 1.0
    whole = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return e * first * second


@triton.jit
def expm1_of(x):
    """Return e^x - 1: with x = n * ln(2) + r it is 2^n * (e^r - 1) + (2^n - 1)."""
    bounded = tl.where(x < -18.0, -18.0, x)
    shifted = bounded * 1.44269504 + 12582912.0
    n = shifted - 12582912.0
    r = (bounded - n * _LN2_HIGH) + n * _LN2_LOW
    p = r * 1.98412698e-4 + 1.38888889e-3
    p = p * r + 8.33333333e-3
    p = p * r + 4.16666667e-2
    p = p * r + 1.66666667e-1
    p = p * r + 0.5
    less_one = r + r * r * p
    whole = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    power = ((whole + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x > 1.0, exp_of(x) - 1.0, power * less_one + (power - 1.0))


@triton.jit
def log_of(x):
    """Return log(x), from x = 2^n * (1 + f) and s = f / (2 + f)."""
    is_tiny = x < 1.17549435e-38
    bits = tl.where(is_tiny, x * 8388608.0, x).to(tl.int32, bitcast=True)
    whole = (bits - 0x3F3504F3) >> 23
    n = tl.where(is_tiny, whole - 23, whole).to(tl.float32)
    f = (bits - (whole << 23)).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    half = 0.5 * (f * f)
    p = z * 1.81818182e-1 + 2.22222222e-1
    p = p * z + 2.85714286e-1
    p = p * z + 4.0e-1
    p = p * z + 6.66666667e-1
    ordinary = n * _LN2_HIGH + (f - (half - (s * (half + z * p) - n * _LN2_LOW)))
    special = tl.where(x == 0.0, float("-inf"), tl.where(x < 0.0, float("nan"), x))
    return tl.where((x > 0.0) & (x < float("inf")), ordinary, special)


@triton.jit
def log1p_of(x):
    """Return log(1 + x): what 1 + x has lost by rounding is made good by a factor."""
    u = 1.0 + x
    is_whole = (u == 1.0) | (u == float("inf"))
    return tl.where(is_whole, x, log_of(u) * tl.div_rn(x, tl.where(is_whole, 1.0, u - 1.0)))


@triton.jit
def order_of(x):
    """Return int32 in the order of the numbers: -0 and +0 are equal, NaN is largest."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def sigmoid_of(x):
    """Return 1 / (1 + e^-x)."""
    return tl.div_rn(1.0, 1.0 + exp_of(-x))


@triton.jit
def silu_of(x):
    """Return x / (1 + e^-x)."""
    return tl.div_rn(x, 1.0 + exp_of(-x))


@triton.jit
def tanh_of(x):
    """Return tanh(x): near 0 by a polynomial, elsewhere by exp."""
    magnitude = tl.where(x < 0.0, -x, x)
    z = x * x
    p = z * -5.716876592e-3 + 2.065045014e-2
    p = p * z + -5.374346301e-2
    p = p * z + 1.333149076e-1
    p = p * z + -3.333328366e-1
    near = x + x * z * p
    far = 1.0 - tl.div_rn(2.0, exp_of(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gelu_of(x):
    """Return x times the normal distribution function of x."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.707106781))


@triton.jit
def gelu_tanh_of(x):
    """Return the approximation of GELU by tanh."""
    return 0.5 * x * (1.0 + tanh_of(0.797884561 * (x + 0.044715 * (x * x * x))))


@triton.jit
def _quarter(x, turns):
    """Return sin(x + turns * pi / 2) for fp32 ``x``, computed in fp64; |x| may be as large as 2^30."""
    wide = x.to(tl.float64)
    n = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - n * 1.5707963267948966) - n * 6.123233995736766e-17
    z = r * r
    sine = z * 2.7557319223985893e-06 - 1.9841269841269841e-04
    sine = sine * z + 8.3333333333333332e-03
    sine = sine * z - 1.6666666666666666e-01
    sine = r + r * z * sine
    cosine = z * -2.7557319223985888e-07 + 2.4801587301587302e-05
    cosine = cosine * z - 1.3888888888888889e-03
    cosine = cosine * z + 4.1666666666666664e-02
    cosine = cosine * z - 0.5
    cosine = cosine * z + 1.0
    quadrant = (n.to(tl.int64) + turns) & 3
    value = tl.where((quadrant & 1) == 1, cosine, sine)
    return tl.where(quadrant >= 2, -value, value).to(tl.float32)


@triton.jit
def sin_of(x):
    """Return sin(x)."""
    return _quarter(x, 0)


@triton.jit
def cos_of(x):
    """Return cos(x)."""
    return _quarter(x, 1)
