// The kernels of recurrent layers: one task advances the state of some channels of one sequence over all its rows. They have
// one source file per instruction set (recurrent_portable.cpp and its neighbours).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/multiversion.h"
#include "ops/conv_rows.h"
#include "ops/linear_attention_rows.h"
#include "ops/selective_scan_rows.h"

namespace specdec {

// Channels of one sequence: of a head for linear attention, of a group for selective scan.
struct ChannelBlock {
  std::int64_t sequence;
  std::int64_t part;  // head or group; 0 for convolutions
  std::int64_t first;  // in the head or group
  std::int64_t width;  // at most a block
};

template <typename Args>
using RecurrentTask = void (*)(const Args&, const ChannelBlock&, float* scratch);

struct RecurrentKernel {
  std::int64_t conv_block;  // channels of a task of conv
  std::int64_t block;       // of the others
  std::array<RecurrentTask<ConvRowsArgs>, 3> conv;  // by DType
  std::array<RecurrentTask<LinearAttentionRowsArgs>, 3> linear_attention;
  std::array<RecurrentTask<SelectiveScanRowsArgs>, 3> selective_scan;
};

// Floats of working memory of a task. A matrix of state has a whole block of channels.
inline std::int64_t scratch_of(const ConvRowsArgs& args, std::int64_t block) { return 2 * (args.kernel + 1) * block; }
inline std::int64_t scratch_of(const LinearAttentionRowsArgs& args, std::int64_t block) {
  return args.key_dim * (block + 4);
}
inline std::int64_t scratch_of(const SelectiveScanRowsArgs& args, std::int64_t block) {
  return args.state_dim * (2 * block + 2);
}

namespace recurrent_portable {
extern const RecurrentKernel kKernel;
}
#ifdef SPECDEC_X86_64_LEVELS
namespace recurrent_x86_64_v3 {
extern const RecurrentKernel kKernel;
}
namespace recurrent_x86_64_v4 {
extern const RecurrentKernel kKernel;
}
#endif

}  // namespace specdec
