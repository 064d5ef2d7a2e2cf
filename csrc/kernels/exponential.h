// exp, as attention, recurrent layers and the row operations compute it.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/multiversion.h"

namespace specdec {

// e^r, where x = n * ln(2) + r with an integer n and |r| <= ln(2)/2, by its Taylor polynomial; e^x = 2^n * e^r. The low bits
// of `shifted` hold n, because it is n + 1.5 * 2^23, a sum that rounds. There is no branch, so that loops around it
// vectorise.
inline __attribute__((always_inline)) float exp_remainder(float x, float& shifted) {
  shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  float e = 1.98412698e-4f;
  e = e * r + 1.38888889e-3f;
  e = e * r + 8.33333333e-3f;
  e = e * r + 4.16666667e-2f;
  e = e * r + 1.66666667e-1f;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  return e * r + 1.0f;
}

// exp(x) within 2 units in the last place. 2^n is multiplied in two factors, so that no exponent overflows. A NaN stays a
// NaN.
SPECDEC_INLINE float exp_of(float x) {
  float bounded = x < -104.0f ? -104.0f : x;  // beyond these bounds exp is 0 or infinity in fp32
  bounded = bounded > 89.0f ? 89.0f : bounded;
  float shifted;
  const float e = exp_remainder(bounded, shifted);
  const std::int32_t whole = static_cast<std::int32_t>(bit_cast<std::uint32_t>(shifted) - 0x4b400000u);
  const std::int32_t half = whole >> 1;
  const float first = bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = bit_cast<float>(static_cast<std::uint32_t>(whole - half + 127) << 23);
  return e * first * second;
}

}  // namespace specdec
