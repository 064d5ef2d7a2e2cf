// One call of linear as its kernels see it: who prepares which rows, and who computes which outputs; and the kernels, one
// source file per instruction set (linear_portable.cpp and its neighbours).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/multiversion.h"
#include "ops/linear.h"

namespace specdec {

struct Range {
  std::int64_t begin, end;
};

struct LinearWork;

// How one kernel goes about one call. Prepared inputs are blocks of rows; threads share blocks and granules of outputs.
struct LinearPlan {
  void (*prepare)(const LinearWork&, std::int64_t block);
  void (*outputs)(const LinearWork&, Range blocks, Range outputs, void* buffer);
  std::int64_t num_steps;     // of a row, a vector or tile of inputs each
  std::int64_t height;        // rows of a block, the last one's may be fewer
  std::int64_t block_bytes;   // a multiple of a vector's
  std::int64_t most_blocks;   // that are prepared at a time
  std::int64_t granule;       // outputs
  std::int64_t buffer_bytes;  // of each thread, for weights
  std::int64_t weight_rows;   // reading a granule's weights takes about as long as multiplying by so many rows
};

// As many blocks as stay in a cache.
inline std::int64_t most_blocks(std::int64_t block_bytes) {
  constexpr std::int64_t kPreparedBytes = 1 << 23;
  return std::max<std::int64_t>(1, kPreparedBytes / block_bytes);
}

struct LinearWork {
  const LinearArgs& args;
  const LinearPlan& plan;
  char* inputs;  // prepared: blocks [0, num_blocks())
  std::int64_t first_row, num_rows;

  std::int64_t num_blocks() const { return (num_rows + plan.height - 1) / plan.height; }
  std::int64_t rows_of(std::int64_t block) const { return std::min(plan.height, num_rows - block * plan.height); }
  std::int64_t row_of(std::int64_t block) const { return first_row + block * plan.height; }
  char* prepared(std::int64_t block) const { return inputs + block * plan.block_bytes; }
};

// Rows of a block, at most `most`: of equal height, because a last one of a row or two keeps no multiplier busy.
inline std::int64_t even_height(std::int64_t num_rows, std::int64_t most) {
  const std::int64_t blocks = (num_rows + most - 1) / most;
  return (num_rows + blocks - 1) / std::max<std::int64_t>(1, blocks);
}

using LinearPlans = std::array<LinearPlan (*)(const LinearArgs&), 3>;  // by DType

namespace linear_portable {
extern const LinearPlans kPlans, kTilePlans;
}
#ifdef SPECDEC_X86_64_LEVELS
namespace linear_x86_64_v3 {
extern const LinearPlans kPlans;
}
namespace linear_x86_64_v4 {
extern const LinearPlans kPlans;
}
namespace linear_avx512_bf16 {
extern const LinearPlans kPlans, kTilePlans;
}
#endif

}  // namespace specdec
