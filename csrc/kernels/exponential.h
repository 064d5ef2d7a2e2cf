// exp, as attention, recurrent layers and the row operations compute it. vector_exponential.h has the same for vectors.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/multiversion.h"

namespace specdec {

// e^r, where x = n * ln(2) + r with an integer n and |r| <= ln(2)/2, by its Taylor polynomial; e^x = 2^n * e^r. The low bits
// of x / ln(2) + kRounder hold n, because that sum rounds.
constexpr float kInverseLn2 = 1.44269504f, kRounder = 12582912.0f;  // 1.5 * 2^23
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // ln(2) in two parts
constexpr float kTaylor[] = {1.98412698e-4f, 1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f};

// There is no branch, so that loops around it vectorise. Every product and every sum is rounded by itself.
SPECDEC_INLINE float exp_remainder(float x, float& shifted) {
  shifted = x * kInverseLn2 + kRounder;
  const float n = shifted - kRounder;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float e = kTaylor[0];
  e = e * r + kTaylor[1];
  e = e * r + kTaylor[2];
  e = e * r + kTaylor[3];
  e = e * r + kTaylor[4];
  e = e * r + kTaylor[5];
  e = e * r + kTaylor[6];
  return e * r + kTaylor[7];
}

constexpr float kLeastExponent = -104.0f, kMostExponent = 89.0f;  // beyond them exp is 0 or infinity in fp32

// exp(x) within 2 units in the last place. 2^n is multiplied in two factors, so that no exponent overflows. A NaN stays a
// NaN.
SPECDEC_INLINE float exp_of(float x) {
  float bounded = x < kLeastExponent ? kLeastExponent : x;
  bounded = bounded > kMostExponent ? kMostExponent : bounded;
  float shifted;
  const float e = exp_remainder(bounded, shifted);
  const std::int32_t whole = static_cast<std::int32_t>(bit_cast<std::uint32_t>(shifted) - bit_cast<std::uint32_t>(kRounder));
  const std::int32_t half = whole >> 1;
  const float first = bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = bit_cast<float>(static_cast<std::uint32_t>(whole - half + 127) << 23);
  return e * first * second;
}

}  // namespace specdec
