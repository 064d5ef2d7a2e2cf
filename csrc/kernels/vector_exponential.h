// exp (exponential.h) of every lane of a vector. Kernels include this file after vectors.h, in their own namespace, once per
// instruction set. It is written for vectors: whether and how GCC vectorises a loop depends on what is inlined around it.

SPECDEC_INLINE Vector exp_remainder(Vector x, Vector& shifted) {
  shifted = multiply_add(x, splat(kInverseLn2), splat(kRounder));
  const Vector n = shifted - kRounder;
  const Vector r = multiply_add(n, splat(-kLn2Low), multiply_add(n, splat(-kLn2High), x));
  Vector e = splat(kTaylor[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) e = multiply_add(e, r, splat(kTaylor[i]));
  return e;
}

using specdec::exp_of;

SPECDEC_INLINE Vector exp_of(Vector x) {
  Vector bounded = x < kLeastExponent ? splat(kLeastExponent) : x;
  bounded = bounded > kMostExponent ? splat(kMostExponent) : bounded;
  Vector shifted;
  const Vector e = exp_remainder(bounded, shifted);
  const Integers whole = reinterpret_cast<Integers>(shifted) - reinterpret_cast<Integers>(splat(kRounder));
  const Integers half = whole >> 1;
  const Vector first = reinterpret_cast<Vector>((half + 127) << 23), second = reinterpret_cast<Vector>((whole - half + 127) << 23);
  return e * first * second;
}

// exp(x) for x <= 0. A NaN stays a NaN, and -infinity gives exactly 0.
SPECDEC_INLINE Vector exp_nonpositive(Vector x) {
  constexpr float kLeast = -87.0f;  // 2^-126: below it nothing is left of a softmax term
  Vector shifted;
  const Vector e = exp_remainder(x < kLeast ? splat(kLeast) : x, shifted);
  const Words exponent = (reinterpret_cast<Words>(shifted) + 127u) << 23;
  return x < kLeast ? Vector{} : e * reinterpret_cast<Vector>(exponent);
}
