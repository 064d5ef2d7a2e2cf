#include "kernels/row_rounding.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/dtype.h"
#include "kernels/multiversion.h"

namespace specdec {
namespace {

constexpr float kLeastRounded = 0x1p-100f;  // LEAST_ROUNDED in specdec_fast/ops/quantized_linear.py

// Rounds a block to whole numbers, and returns their sum. Overwrites the numbers.
template <int kSize>
SPECDEC_INLINE std::int32_t round_block(float* __restrict numbers, float inverse, std::int8_t* __restrict whole) {
  constexpr float kWhole = 0x1.8p23f;  // adding it rounds to a whole number, half to even
  // Two loops: in one, the compiler would fuse product and sum, and round once where the contract rounds twice.
  for (int i = 0; i < kSize; ++i) numbers[i] *= inverse;
  std::int32_t sum = 0;
  for (int i = 0; i < kSize; ++i) {
    const std::int32_t rounded = bit_cast<std::int32_t>(numbers[i] + kWhole) - bit_cast<std::int32_t>(kWhole);
    whole[i] = static_cast<std::int8_t>(rounded);
    sum += rounded;
  }
  return sum;
}

constexpr int kBlocksAtOnce = 16;

// Rounds up to kBlocksAtOnce blocks. What needs one number of each block is computed for all of them, so that no block
// waits for the one before. The step of a block, which a whole number stands for, is NaN if a number is not finite.
template <int kSize>
SPECDEC_INLINE void round_blocks(float* numbers, int count, const RoundedRow& to) {
  const auto least = bit_cast<std::int32_t>(kLeastRounded), infinity = bit_cast<std::int32_t>(Float32::kInfinity);
  std::int32_t bits[kBlocksAtOnce] = {};  // those of the largest magnitude, which compare as magnitudes do
  for (int block = 0; block < count; ++block) {
    std::int32_t most = 0;
    for (int i = 0; i < kSize; ++i) {
      most = std::max(most, bit_cast<std::int32_t>(numbers[block * kSize + i]) & 0x7fffffff);
    }
    bits[block] = most;
  }
  float inverses[kBlocksAtOnce], steps[kBlocksAtOnce];
#pragma omp simd
  for (int block = 0; block < kBlocksAtOnce; ++block) {
    const float largest = bit_cast<float>(bits[block]);
    const bool is_zero = bits[block] < least, is_finite = bits[block] < infinity;
    const float inverse = 127.0f / largest, step = largest / 127.0f;
    inverses[block] = is_zero | !is_finite ? 0.0f : inverse;
    steps[block] = is_zero ? 0.0f : is_finite ? step : std::numeric_limits<float>::quiet_NaN();
  }
  std::int32_t sums[kBlocksAtOnce] = {};
  for (int block = 0; block < count; ++block) {
    std::int8_t* whole = to.whole + block * to.stride * kSize;
    if (inverses[block] != 0.0f) {
      sums[block] = round_block<kSize>(numbers + block * kSize, inverses[block], whole);
    } else {
      std::memset(whole, 0, kSize);
    }
  }
  for (int block = 0; block < count; ++block) {
    const std::int64_t at = block * to.stride;
    to.steps[at] = steps[block];
    to.sums[at] = steps[block] * static_cast<float>(sums[block]);
    to.offsets[at] = -to.offset * sums[block];
  }
}

template <int kSize>
SPECDEC_INLINE void round_all(float* numbers, std::int64_t num_blocks, RoundedRow to) {
  for (std::int64_t left = num_blocks; left > 0; left -= kBlocksAtOnce, numbers += kBlocksAtOnce * kSize) {
    round_blocks<kSize>(numbers, static_cast<int>(std::min<std::int64_t>(left, kBlocksAtOnce)), to);
    const std::int64_t passed = kBlocksAtOnce * to.stride;
    to = {to.whole + passed * kSize, to.steps + passed, to.sums + passed, to.offsets + passed, to.stride, to.offset};
  }
}

}  // namespace

SPECDEC_MULTIVERSION
void round_blocks_of_16(float* numbers, std::int64_t num_blocks, const RoundedRow& to) {
  round_all<16>(numbers, num_blocks, to);
}
SPECDEC_MULTIVERSION
void round_blocks_of_32(float* numbers, std::int64_t num_blocks, const RoundedRow& to) {
  round_all<32>(numbers, num_blocks, to);
}

}  // namespace specdec
