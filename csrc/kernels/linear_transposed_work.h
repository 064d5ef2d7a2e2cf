// The kernels of linear_transposed, one source file per instruction set (linear_transposed_portable.cpp and its neighbours).
#pragma once

#include <cstdint>

#include "kernels/multiversion.h"
#include "ops/linear.h"

namespace specdec {

// The kernel for one instruction set.
struct TransposedKernel {
  struct Format {
    std::int64_t (*num_units)(std::int64_t in_features);  // floats of a prepared row
    void (*prepare)(const LinearArgs&, float* units);
    void (*outputs)(const LinearArgs&, const float* units, std::int64_t begin, std::int64_t end);
  };
  Format formats[3];  // by DType
  std::int64_t step;  // outputs of a block; every thread computes whole blocks
};

namespace transposed_portable {
extern const TransposedKernel kKernel;
}
#ifdef SPECDEC_X86_64_LEVELS
namespace transposed_x86_64_v3 {
extern const TransposedKernel kKernel;
}
namespace transposed_x86_64_v4 {
extern const TransposedKernel kKernel;
}
namespace transposed_avx512_bf16 {
extern const TransposedKernel kKernel;
}
#endif

}  // namespace specdec
