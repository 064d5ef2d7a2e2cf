// The softmax of paged_attention: a tile's scores become weights, and join the running softmax of each row. Included once
// per instruction set, between attention_products.h and attention_kernel.h.

namespace specdec {
namespace SPECDEC_ISA {

// exp(x) for x <= 0 within 2 units in the last place. A NaN stays a NaN, and -infinity gives exactly 0.
SPECDEC_INLINE float exp_nonpositive(float x) {
  float shifted;
  const float e = exp_remainder(x < -87.0f ? -87.0f : x, shifted);  // 2^-126: below it nothing is left of a softmax term
  const std::uint32_t exponent = (bit_cast<std::uint32_t>(shifted) + 127u) << 23;
  return x < -87.0f ? 0.0f : e * bit_cast<float>(exponent);
}

// tanh(x) within 1.5 units in the last place; from |x| = 2 on, where the largest scores are, within 0.6. Near 0, where the
// difference would cancel, it is an odd polynomial (coefficients of the Cephes library, tanhf). It has no branch, so that
// loops around it vectorise.
SPECDEC_INLINE float tanh_of(float x) {
  const float square = x * x, magnitude = std::fabs(x);
  float series = -5.70498872745e-3f * square + 2.06390887954e-2f;
  series = series * square - 5.37397155531e-2f;
  series = series * square + 1.33314422036e-1f;
  series = series * square - 3.33332819422e-1f;
  const float near = series * square * x + x;
  const float e = exp_nonpositive(-2.0f * magnitude);
  const float far = 1.0f - 2.0f * e / (1.0f + e);  // (1 - e) / (1 + e) would round three times, not once
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Fold a tile's scores into the running softmax of one row (FlashAttention, arXiv 2205.14135, algorithm 1). Scores become
// weights; -infinity becomes the weight 0. Returns the factor by which the earlier sums must be multiplied. If weights are
// multiplied as bf16, they are rounded before they are summed, so that an output is a mean of values.
template <typename Product>
SPECDEC_INLINE float soften(float* scores, float& maximum, float& sum) {
  float highest = maximum;
#pragma omp simd reduction(max : highest)
  for (std::int64_t j = 0; j < kTile; ++j) highest = scores[j] > highest ? scores[j] : highest;
  const float rescale = exp_nonpositive(maximum - highest);
  float added = 0.0f;
#pragma omp simd reduction(+ : added)
  for (std::int64_t j = 0; j < kTile; ++j) {
    float weight = exp_nonpositive(scores[j] - highest);
    if constexpr (Product::kNumbers == 2) {
      const std::uint32_t bits = bit_cast<std::uint32_t>(weight);
      weight = bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
    }
    scores[j] = weight;
    added += weight;
  }
  if constexpr (Product::kNumbers == 2) {
    std::uint16_t weights[kTile];
    for (std::int64_t j = 0; j < kTile; ++j) {
      weights[j] = static_cast<std::uint16_t>(bit_cast<std::uint32_t>(scores[j]) >> 16);
    }
    std::memcpy(scores, weights, sizeof(weights));
  }
  maximum = highest;
  sum = sum * rescale + added;
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
      for (std::int64_t j = 0; j < kTile; ++j) row[j] = args.softcap * tanh_of(row[j] / args.softcap);
    }
    const std::uint64_t seen = visible(args, rows, i / group, tile);
    if (~seen) hide(row, seen);
    scratch.rescale[i] = seen ? soften<Product>(row, scratch.maximum[i], scratch.sum[i]) : 1.0f;
    if (!seen) std::fill(row, row + kTile, 0.0f);
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
