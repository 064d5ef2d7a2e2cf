// Conversion of numbers of `dtype` to fp32 and back, rounded to nearest even.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace specdec {

void widen_all(DType dtype, const void* from, float* to, std::int64_t size);
void narrow_all(DType dtype, const float* from, void* to, std::int64_t size);

}  // namespace specdec
