// What the kernels of recurrent layers share, included once per instruction set, before the others.
//
// A lane is one channel, and no sum crosses lanes. So a channel's bits depend neither on the number of lanes nor on how
// channels are divided among tasks. Channels after the last one of a block are computed as zeros.

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vectors.h"

#include "kernels/vector_exponential.h"

constexpr int kVectors = 4;  // that a block of channels fills
constexpr std::int64_t kBlock = kVectors * kLanes;

template <typename Storage>
SPECDEC_INLINE const Storage* as(const void* from) {
  return static_cast<const Storage*>(from);
}

template <typename Format>
SPECDEC_INLINE void load_numbers(const typename Format::Storage* __restrict from, float* __restrict to,
                                 std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = Format::load(from[i]);
}

template <typename Format>
SPECDEC_INLINE void store_numbers(const float* __restrict from, typename Format::Storage* __restrict to,
                                  std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = Format::store(from[i]);
}

SPECDEC_INLINE void copy_numbers(const float* from, float* to, std::int64_t count) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

// Loads `height` rows of a block's channels, `stride` apart; without `from`, and after the last channel, zeros.
SPECDEC_INLINE void load_state(const float* from, std::int64_t height, std::int64_t stride, std::int64_t width,
                               float* state) {
  if (!from || width < kBlock) std::memset(state, 0, static_cast<std::size_t>(height * kBlock) * sizeof(float));
  for (std::int64_t k = 0; from && k < height; ++k) copy_numbers(from + k * stride, state + k * kBlock, width);
}

SPECDEC_INLINE void store_state(const float* state, std::int64_t height, std::int64_t stride, std::int64_t width,
                                float* to) {
  for (std::int64_t k = 0; k < height; ++k) copy_numbers(state + k * kBlock, to + k * stride, width);
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
