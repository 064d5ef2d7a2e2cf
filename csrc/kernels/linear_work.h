// One call of linear as its kernels see it: which rows they prepare, and which outputs they compute. The kernels have one
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

// How one kernel computes one call. Inputs are prepared in blocks of rows; blocks and granules of outputs are divided among
// threads.
struct LinearPlan {
  void (*prepare)(const LinearWork&, std::int64_t block);
  void (*outputs)(const LinearWork&, Range blocks, Range outputs, void* buffer);
  std::int64_t num_steps;     // steps of a row; a step is a vector or a tile of inputs
  std::int64_t height;        // rows of a block; the last block may have fewer
  std::int64_t block_bytes;   // bytes of a prepared block, a multiple of a vector's
  std::int64_t most_blocks;   // blocks that are prepared at a time
  std::int64_t granule;       // a thread's outputs are a multiple of it
  std::int64_t buffer_bytes;  // memory of each thread for weights
  std::int64_t weight_rows;   // reading a granule's weights takes about as long as multiplying them with so many rows
};

// The number of blocks that stay in a cache.
inline std::int64_t most_blocks(std::int64_t block_bytes) {
  constexpr std::int64_t kPreparedBytes = 1 << 23;
  return std::max<std::int64_t>(1, kPreparedBytes / block_bytes);
}

struct LinearWork {
  const LinearArgs& args;
  const LinearPlan& plan;
  char* inputs;  // the prepared blocks [0, num_blocks())
  std::int64_t first_row, num_rows;

  std::int64_t num_blocks() const { return (num_rows + plan.height - 1) / plan.height; }
  std::int64_t rows_of(std::int64_t block) const { return std::min(plan.height, num_rows - block * plan.height); }
  std::int64_t row_of(std::int64_t block) const { return first_row + block * plan.height; }
  char* prepared(std::int64_t block) const { return inputs + block * plan.block_bytes; }
};

// Rows of a block, at most `most`. Blocks get about equal heights, because a last block of a row or two would leave
// multipliers idle.
inline std::int64_t even_height(std::int64_t num_rows, std::int64_t most) {
  const std::int64_t blocks = (num_rows + most - 1) / most;
  return (num_rows + blocks - 1) / std::max<std::int64_t>(1, blocks);
}

using LinearPlanner = LinearPlan (*)(const LinearArgs&);
using LinearPlans = std::array<LinearPlanner, 3>;  // by DType

namespace linear_portable {
extern const LinearPlans kPlans, kTilePlans;
extern const LinearPlanner kTransposedTilePlan;  // of linear_transposed, in bf16
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
extern const LinearPlanner kTransposedTilePlan;
}
#endif

}  // namespace specdec
