// The functions of a forward program's row operations, on contiguous fp32 numbers. rowwise.h says what they compute.
#pragma once

#include <cstdint>

#include "program/rowwise.h"

namespace specdec {

// out[i] = function(a[i], b[i], c[i]). Operands that a function does not take are null. `code` precedes kMean.
void run_elementwise(RowCode code, const float* a, const float* b, const float* c, float* out, std::int64_t size);

float sum(const float* a, std::int64_t size);
void layer_norm(const float* a, const float* weight, const float* bias, float epsilon, float* out, std::int64_t size);

// The largest number, -inf if all are NaN.
float largest(const float* a, std::int64_t size);

// The sum of exp((x - from) * scale).
float sum_of_exponentials(const float* a, float from, float scale, std::int64_t size);

// exp(x - the largest x), divided by the sum of these. Numbers that are all -inf give NaN, as in PyTorch.
void softmax(const float* a, float* out, std::int64_t size);

// The places of the `count` largest of `size` numbers. NaN counts as the largest. The standard library's algorithms decide
// which of equal numbers are chosen, and the order if it is not sorted. PyTorch uses the same algorithms on CPUs, so routers
// whose scores tie choose the same experts. The result depends on these numbers alone.
void top_k(const float* a, std::int64_t size, float* out, std::int64_t count, bool is_sorted);

// The first place of the largest of `size` numbers; that of the first NaN if there is one, as in PyTorch.
std::int64_t first_largest(const float* a, std::int64_t size);

}  // namespace specdec
