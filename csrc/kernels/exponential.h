// The part of exp that attention and the row operations share.
#pragma once

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

}  // namespace specdec
