// The softmax of paged_attention: a tile's scores become weights, and join the running softmax of each row. Included once
// per instruction set, between attention_products.h and attention_kernel.h.

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vector_exponential.h"

// tanh(x) within 1.5 units in the last place; from |x| = 2 on, where the largest scores are, within 0.6. Near 0, where the
// difference would cancel, it is an odd polynomial (coefficients of the Cephes library, tanhf).
SPECDEC_INLINE Vector tanh_of(Vector x) {
  const Vector square = x * x, magnitude = reinterpret_cast<Vector>(reinterpret_cast<Words>(x) & 0x7fffffffu);
  Vector series = multiply_add(square, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
  series = multiply_add(series, square, splat(-5.37397155531e-2f));
  series = multiply_add(series, square, splat(1.33314422036e-1f));
  series = multiply_add(series, square, splat(-3.33332819422e-1f));
  const Vector near = multiply_add(series * square, x, x);
  const Vector e = exp_nonpositive(-2.0f * magnitude);
  const Vector far = 1.0f - 2.0f * e / (1.0f + e);  // (1 - e) / (1 + e) would round three times, not once
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Combine the lanes of a vector in pairs: always the upper half with the lower one.
template <typename Combine>
SPECDEC_INLINE float combined(Vector lanes, Combine combine) {
  typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
#if SPECDEC_LANES == 16
  typedef float Eight __attribute__((vector_size(8 * sizeof(float))));
  Eight eights[2];
  std::memcpy(eights, &lanes, sizeof(lanes));
  const Eight half = combine(eights[0], eights[1]);
#else
  const Vector half = lanes;
#endif
#if SPECDEC_LANES >= 8
  Quad quads[2];
  std::memcpy(quads, &half, sizeof(half));
  const Quad quad = combine(quads[0], quads[1]);
#else
  const Quad quad = half;
#endif
  const float even = quad[0], odd = quad[1];
  return combine(combine(even, static_cast<float>(quad[2])), combine(odd, static_cast<float>(quad[3])));
}

// Fold a tile's scores into the running softmax of one row (FlashAttention, arXiv 2205.14135, algorithm 1). Scores become
// weights; -infinity becomes the weight 0. Returns the factor by which the earlier sums must be multiplied. If weights are
// multiplied as bf16, they are rounded before they are summed, so that an output is a mean of values.
template <typename Product>
SPECDEC_INLINE float soften(float* scores, float& maximum, float& sum) {
  Vector highest = splat(maximum);
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kTile; j += kLanes) {
    const Vector own = load_vector(scores + j);
    highest = own > highest ? own : highest;
  }
  const float most = combined(highest, [](auto one, auto other) { return other > one ? other : one; });
  Vector added = {};
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kTile; j += kLanes) {
    Vector weights = exp_nonpositive(load_vector(scores + j) - most);
    if constexpr (Product::kNumbers == 2) {
      const Words bits = reinterpret_cast<Words>(weights), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      weights = reinterpret_cast<Vector>(rounded << 16);
      store_as(reinterpret_cast<char*>(scores) + 2 * j, __builtin_convertvector(rounded, Halves));
    } else {
      store_as(scores + j, weights);
    }
    added += weights;
  }
  const float rescale = exp_nonpositive(splat(maximum - most))[0];
  maximum = most;
  sum = sum * rescale + combined(added, [](auto one, auto other) { return one + other; });
  return rescale;
}

SPECDEC_INLINE void hide(float* scores, std::uint64_t seen) {
  for (std::int64_t j = 0; j < kTile; ++j) {
    if (!(seen >> j & 1)) scores[j] = -kInfinity;
  }
}

// Make the outputs of the vectors [begin, end) that see a value of the tile which is not finite NaN.
SPECDEC_INLINE void invalidate(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t tile,
                               std::int64_t begin, std::int64_t end, std::uint64_t broken) {
  if (!broken) return;
  const std::int64_t group = args.num_heads / args.num_kv_heads;
  for (std::int64_t i = begin; i < end; ++i) {
    if (visible(args, rows, i / group, tile) & broken) scratch.sum[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

// Turn the scores of vectors [begin, end) for a tile into weights.
template <typename Product>
SPECDEC_INLINE void weigh(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t tile,
                          std::int64_t begin, std::int64_t end) {
  const std::int64_t group = args.num_heads / args.num_kv_heads;
  for (std::int64_t i = begin; i < end; ++i) {
    float* row = scratch.scores.data() + i * kTile;
    if (Product::kNumbers == 2) {  // bf16 queries could not be scaled before the product
      for (std::int64_t j = 0; j < kTile; ++j) row[j] *= args.scale;
    }
    if (args.softcap > 0) {
      for (std::int64_t j = 0; j < kTile; j += kLanes) {
        store_as(row + j, args.softcap * tanh_of(load_vector(row + j) / args.softcap));
      }
    }
    const std::uint64_t seen = visible(args, rows, i / group, tile);
    if (~seen) hide(row, seen);
    scratch.rescale[i] = seen ? soften<Product>(row, scratch.maximum[i], scratch.sum[i]) : 1.0f;
    if (!seen) std::fill(row, row + kTile, 0.0f);
  }
}

// The same for many vectors: as a call, because GCC 12 would keep the constants of exp in registers that the products around
// it need. For few vectors, calls take longer than that.
template <typename Product>
__attribute__((noinline)) void weigh_many(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t tile,
                                          std::int64_t begin, std::int64_t end) {
  weigh<Product>(args, scratch, rows, tile, begin, end);
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
