// The functions of a forward program's row operations, of fp32 numbers side by side. See rowwise.h for what they compute.
#pragma once

#include <cstdint>

#include "program/rowwise.h"

namespace specdec {

// out[i] = function(a[i], b[i], c[i]); null where a function takes fewer. `code` is one before kMean.
void run_elementwise(RowCode code, const float* a, const float* b, const float* c, float* out, std::int64_t size);

float sum(const float* a, std::int64_t size);
void layer_norm(const float* a, const float* weight, const float* bias, float epsilon, float* out, std::int64_t size);

// exp(x - the largest) over their sum; a line of -inf alone gives NaN, as in PyTorch.
void softmax(const float* a, float* out, std::int64_t size);

// Where the `count` largest of `size` numbers stand; NaN counts as the largest. Which of equal numbers are chosen, and the
// order of what is not sorted, is left to the standard library's algorithms: the same that PyTorch uses on CPUs, so that
// routers whose scores tie choose the same experts. They see nothing but these numbers.
void top_k(const float* a, std::int64_t size, float* out, std::int64_t count, bool is_sorted);

}  // namespace specdec
