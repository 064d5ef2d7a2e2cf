#include "program/row_functions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/exponential.h"
#include "kernels/multiversion.h"

namespace specdec {
namespace {

// tanh(x) within 2 units in the last place: near 0 by a polynomial (least squares on [0, 0.625^2], reweighted to equal
// errors), elsewhere by exp.
SPECDEC_INLINE float tanh_of(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.716876592e-3f;
  p = p * z + 2.065045014e-2f;
  p = p * z - 5.374346301e-2f;
  p = p * z + 1.333149076e-1f;
  p = p * z - 3.333328366e-1f;
  const float near = x + x * z * p;
  const float far = 1.0f - 2.0f / (exp_of(2.0f * magnitude) + 1.0f);
  const float beyond = x < 0.0f ? -far : far;
  return magnitude < 0.625f ? near : beyond;
}

// e^x - 1 within 2 units in the last place. With x = n * ln(2) + r it is 2^n * (e^r - 1) + (2^n - 1), which cancels nowhere;
// beyond 1 nothing cancels in e^x - 1 either. Below -18 it is -1 in fp32.
SPECDEC_INLINE float expm1_of(float x) {
  const float bounded = x < -18.0f ? -18.0f : x;
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // as in exp_remainder
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  const float less_one = r + r * r * p;  // e^r - 1
  const std::uint32_t whole = bit_cast<std::uint32_t>(shifted) - 0x4b400000u;
  const float power = bit_cast<float>((whole + 127u) << 23);
  return x > 1.0f ? exp_of(x) - 1.0f : power * less_one + (power - 1.0f);
}

// log(x) within 2 units in the last place: x = 2^n * (1 + f), with 1 + f between the roots of 1/2 and 2. With
// s = f / (2 + f), log(1 + f) = 2 * (s + s^3 / 3 + s^5 / 5 + ...). As f = 2 * s + s * f, that is
// f - f^2 / 2 + s * (f^2 / 2 + 2 * (s^2 / 3 + s^4 / 5 + ...)), whose first term is exact.
SPECDEC_INLINE float log_of(float x) {
  const bool is_tiny = x < 1.17549435e-38f;
  // Unsigned, because the bits of negative numbers leave the range of a difference; such a result is not used.
  const std::uint32_t bits = bit_cast<std::uint32_t>(is_tiny ? x * 8388608.0f : x);
  const std::int32_t whole = static_cast<std::int32_t>(bits - 0x3f3504f3u) >> 23;
  const float n = static_cast<float>(is_tiny ? whole - 23 : whole);
  const float f = bit_cast<float>(bits - (static_cast<std::uint32_t>(whole) << 23)) - 1.0f;
  const float s = f / (2.0f + f), z = s * s, half = 0.5f * (f * f);
  float p = 1.81818182e-1f;
  p = p * z + 2.22222222e-1f;
  p = p * z + 2.85714286e-1f;
  p = p * z + 4.0e-1f;
  p = p * z + 6.66666667e-1f;
  const float ordinary = n * 0.693359375f + (f - (half - (s * (half + z * p) - n * 2.12194440e-4f)));
  const float infinity = std::numeric_limits<float>::infinity();
  const float special = x == 0.0f ? -infinity : x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : x;
  return x > 0.0f && x < infinity ? ordinary : special;
}

// log(1 + x): what 1 + x has lost by rounding is made good by a factor.
SPECDEC_INLINE float log1p_of(float x) {
  const float u = 1.0f + x;
  const float scaled = log_of(u) * (x / (u - 1.0f));
  return u == 1.0f || u == std::numeric_limits<float>::infinity() ? x : scaled;
}

using Function = void (*)(const float* a, const float* b, const float* c, float* out, std::int64_t size);

#define SPECDEC_ROW_FUNCTION(name, expression)                                                             \
  SPECDEC_MULTIVERSION                                                                                     \
  void name(const float* __restrict a, [[maybe_unused]] const float* __restrict b,                         \
            [[maybe_unused]] const float* __restrict c, float* __restrict out, std::int64_t size) {        \
    for (std::int64_t i = 0; i < size; ++i) {                                                              \
      const float x = a[i];                                                                                \
      out[i] = expression;                                                                                 \
    }                                                                                                      \
  }

SPECDEC_ROW_FUNCTION(copy, x)
SPECDEC_ROW_FUNCTION(neg, -x)
SPECDEC_ROW_FUNCTION(absolute, std::fabs(x))
SPECDEC_ROW_FUNCTION(square, x * x)
SPECDEC_ROW_FUNCTION(square_root, std::sqrt(x))
SPECDEC_ROW_FUNCTION(reciprocal_root, 1.0f / std::sqrt(x))
SPECDEC_ROW_FUNCTION(reciprocal, 1.0f / x)
SPECDEC_ROW_FUNCTION(exponential, exp_of(x))
SPECDEC_ROW_FUNCTION(sine, std::sin(x))
SPECDEC_ROW_FUNCTION(cosine, std::cos(x))
SPECDEC_ROW_FUNCTION(sigmoid, 1.0f / (1.0f + exp_of(-x)))
SPECDEC_ROW_FUNCTION(silu, x / (1.0f + exp_of(-x)))
SPECDEC_ROW_FUNCTION(tanh_function, tanh_of(x))
SPECDEC_ROW_FUNCTION(relu, x < 0.0f ? 0.0f : x)
SPECDEC_ROW_FUNCTION(gelu, 0.5f * x * (1.0f + std::erf(x * 0.707106781f)))
SPECDEC_ROW_FUNCTION(gelu_tanh, 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * (x * x * x)))))
SPECDEC_ROW_FUNCTION(round_down, std::floor(x))
SPECDEC_ROW_FUNCTION(logarithm, log_of(x))
SPECDEC_ROW_FUNCTION(logarithm_of_one_more, log1p_of(x))
SPECDEC_ROW_FUNCTION(exponential_less_one, expm1_of(x))
SPECDEC_ROW_FUNCTION(add, x + b[i])
SPECDEC_ROW_FUNCTION(sub, x - b[i])
SPECDEC_ROW_FUNCTION(mul, x* b[i])
SPECDEC_ROW_FUNCTION(div, x / b[i])
SPECDEC_ROW_FUNCTION(maximum, x < b[i] || b[i] != b[i] ? b[i] : x)  // a NaN wins
SPECDEC_ROW_FUNCTION(minimum, x > b[i] || b[i] != b[i] ? b[i] : x)
SPECDEC_ROW_FUNCTION(equal, x == b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(not_equal, x != b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(less, x < b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(less_or_equal, x <= b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(greater, x > b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(greater_or_equal, x >= b[i] ? 1.0f : 0.0f)
SPECDEC_ROW_FUNCTION(where, x != 0.0f ? b[i] : c[i])
#undef SPECDEC_ROW_FUNCTION

constexpr Function kFunctions[] = {copy, neg,  absolute,      square, square_root, reciprocal_root, reciprocal,
                                   exponential, sine, cosine, sigmoid, silu, tanh_function, relu, gelu, gelu_tanh,
                                   round_down, logarithm, logarithm_of_one_more, exponential_less_one,
                                   add,  sub,  mul,           div, maximum, minimum, equal, not_equal, less,
                                   less_or_equal, greater, greater_or_equal, where};
static_assert(sizeof(kFunctions) / sizeof(Function) == static_cast<int>(RowCode::kMean), "one per code");

constexpr int kLanes = 16;  // lanes of a sum: the same on every instruction set, so that all give the same bits

// Lane l adds numbers l, l + 16, ...; the lanes are then added in pairs.
template <typename Term>
SPECDEC_INLINE float sum_of(std::int64_t size, Term term) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < size; ++lane) lanes[lane] += term(i + lane);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

SPECDEC_MULTIVERSION
float squared_distance(const float* a, float from, std::int64_t size) {
  return sum_of(size, [a, from](std::int64_t i) { return (a[i] - from) * (a[i] - from); });
}

// weight and bias have the layout of a.
SPECDEC_MULTIVERSION
void scale_and_shift(const float* __restrict a, const float* __restrict weight, const float* __restrict bias,
                     float mean, float scale, float* __restrict out, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) out[i] = (a[i] - mean) * scale * weight[i] + bias[i];
}

}  // namespace

void run_elementwise(RowCode code, const float* a, const float* b, const float* c, float* out, std::int64_t size) {
  kFunctions[static_cast<int>(code)](a, b, c, out, size);
}

SPECDEC_MULTIVERSION
float sum(const float* a, std::int64_t size) {
  return sum_of(size, [a](std::int64_t i) { return a[i]; });
}

SPECDEC_MULTIVERSION
float largest(const float* a, std::int64_t size) {
  float found = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : found)
  for (std::int64_t i = 0; i < size; ++i) found = a[i] > found ? a[i] : found;
  return found;
}

SPECDEC_MULTIVERSION
float sum_of_exponentials(const float* a, float from, float scale, std::int64_t size) {
  return sum_of(size, [a, from, scale](std::int64_t i) { return exp_of((a[i] - from) * scale); });
}

SPECDEC_MULTIVERSION
void softmax(const float* __restrict a, float* __restrict out, std::int64_t size) {
  const float from = largest(a, size);
  for (std::int64_t i = 0; i < size; ++i) out[i] = exp_of(a[i] - from);
  const float total = sum_of(size, [out](std::int64_t i) { return out[i]; });
  for (std::int64_t i = 0; i < size; ++i) out[i] = out[i] / total;
}

void top_k(const float* a, std::int64_t size, float* out, std::int64_t count, bool is_sorted) {
  using Place = std::pair<float, std::int64_t>;
  std::vector<Place> places(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) places[i] = {a[i], i};
  const auto comes_first = [](const Place& one, const Place& other) {
    return one.first > other.first || (one.first != one.first && other.first == other.first);
  };
  if (count * 64 <= size) {
    std::partial_sort(places.begin(), places.begin() + count, places.end(), comes_first);
  } else if (count > 0) {
    std::nth_element(places.begin(), places.begin() + count - 1, places.end(), comes_first);
    if (is_sorted) std::sort(places.begin(), places.begin() + count - 1, comes_first);
  }
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(places[i].second);
}

std::int64_t first_largest(const float* a, std::int64_t size) {
  std::int64_t best = 0;
  for (std::int64_t i = 1; i < size; ++i) {
    if (a[best] == a[best] && !(a[i] <= a[best])) best = i;  // true if a[i] is a NaN
  }
  return best;
}

void layer_norm(const float* a, const float* weight, const float* bias, float epsilon, float* out, std::int64_t size) {
  const float mean = sum(a, size) / static_cast<float>(size);
  const float variance = squared_distance(a, mean, size) / static_cast<float>(size);
  scale_and_shift(a, weight, bias, mean, 1.0f / std::sqrt(variance + epsilon), out, size);
}

}  // namespace specdec
