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

typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef std::int32_t QuadIndex __attribute__((vector_size(4 * sizeof(std::int32_t))));

// Combine the lanes of a vector in pairs, the upper half with the lower one, until four are left.
template <typename Combine>
SPECDEC_INLINE Quad four_combined(Vector lanes, Combine combine) {
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
  return combine(quads[0], quads[1]);
#else
  return half;
#endif
}

constexpr int kSoftened = 4;  // rows whose scores become weights together

// Combine the lanes of each of kRows vectors in pairs, always in the same order, to one number of each.
template <int kRows, typename Combine>
SPECDEC_INLINE void combine_lanes(const Vector (&lanes)[kRows], Combine combine, float* to) {
  if constexpr (kRows == kSoftened) {  // transposed, so that an instruction combines numbers of all rows
    const Quad a = four_combined(lanes[0], combine), b = four_combined(lanes[1], combine);
    const Quad c = four_combined(lanes[2], combine), d = four_combined(lanes[3], combine);
    const QuadIndex low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const Quad ab = shuffled(a, b, low), cd = shuffled(c, d, low), above_ab = shuffled(a, b, high), above_cd = shuffled(c, d, high);
    const Quad even = combine(shuffled(ab, cd, first), shuffled(above_ab, above_cd, first));
    const Quad odd = combine(shuffled(ab, cd, second), shuffled(above_ab, above_cd, second));
    store_as(to, combine(even, odd));
  } else {
    for (int r = 0; r < kRows; ++r) {
      const Quad quad = four_combined(lanes[r], combine);
      const float even = quad[0], odd = quad[1];
      to[r] = combine(combine(even, static_cast<float>(quad[2])), combine(odd, static_cast<float>(quad[3])));
    }
  }
}

// What `soften` reads and writes of kRows rows: scores are kTile apart, all others side by side.
struct SoftenedRows {
  float *scores, *maximum, *sum, *rescale;
};

// Fold a tile's scores, times `scale`, into the running softmax of kRows rows (FlashAttention, arXiv 2205.14135,
// algorithm 1). Scores become weights; -infinity becomes the weight 0. `rescale` becomes the factors by which the earlier
// sums must be multiplied. If weights are multiplied as bf16, they are rounded before they are summed, so that an output is
// a mean of values.
template <typename Product, int kRows>
SPECDEC_INLINE void soften(SoftenedRows rows, float scale) {
  const auto score = [&](int r, std::int64_t j) { return load_vector(rows.scores + r * kTile + j) * scale; };
  Vector highest[kRows];
  for (int r = 0; r < kRows; ++r) highest[r] = splat(rows.maximum[r]);
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kTile; j += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vector own = score(r, j);
      highest[r] = own > highest[r] ? own : highest[r];
    }
  }
  float most[kRows];
  combine_lanes<kRows>(highest, [](auto one, auto other) { return other > one ? other : one; }, most);
  Vector added[kRows] = {};
#pragma GCC unroll 16
  for (std::int64_t j = 0; j < kTile; j += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Vector weights = exp_nonpositive(score(r, j) - most[r]);
      float* to = rows.scores + r * kTile;
      if constexpr (Product::kNumbers == 2) {
        const Words bits = reinterpret_cast<Words>(weights), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        weights = reinterpret_cast<Vector>(rounded << 16);
        store_as(reinterpret_cast<char*>(to) + 2 * j, __builtin_convertvector(rounded, Halves));
      } else {
        store_as(to + j, weights);
      }
      added[r] += weights;
    }
  }
  float totals[kRows];
  combine_lanes<kRows>(added, [](auto one, auto other) { return one + other; }, totals);
  Vector changes = {};
  for (int r = 0; r < kRows; ++r) changes[r] = rows.maximum[r] - most[r];
  const Vector factors = exp_nonpositive(changes);
  for (int r = 0; r < kRows; ++r) {
    rows.rescale[r] = factors[r];
    rows.maximum[r] = most[r];
    rows.sum[r] = rows.sum[r] * factors[r] + totals[r];
  }
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
  const float scale = Product::kNumbers == 2 ? args.scale : 1.0f;  // bf16 queries could not be scaled before the product
  const auto softened = [&](std::int64_t i) {
    return SoftenedRows{scratch.scores.data() + i * kTile, &scratch.maximum[i], &scratch.sum[i], &scratch.rescale[i]};
  };
  const auto sees_all = [&](std::int64_t i) { return args.softcap == 0 && ~visible(args, rows, i / group, tile) == 0; };
  // If the first and the last row of a block see all, those between them do: what is seen begins and ends in order. Not in a
  // tree, where a deeper row may lie between them.
  const std::int64_t checked_step = args.tree_mask ? 1 : kSoftened - 1;
  const auto all_see_all = [&](std::int64_t first) {
    bool all = true;
    for (std::int64_t r = 0; all && r < kSoftened; r += checked_step) all = sees_all(first + r);
    return all;
  };
  for (std::int64_t i = begin; i < end;) {
    if (i + kSoftened <= end && all_see_all(i)) {
      soften<Product, kSoftened>(softened(i), scale);
      i += kSoftened;
      continue;
    }
    float* row = scratch.scores.data() + i * kTile;
    if (Product::kNumbers == 2) {
      for (std::int64_t j = 0; j < kTile; ++j) row[j] *= scale;
    }
    if (args.softcap > 0) {
      for (std::int64_t j = 0; j < kTile; j += kLanes) {
        store_as(row + j, args.softcap * tanh_of(load_vector(row + j) / args.softcap));
      }
    }
    const std::uint64_t seen = visible(args, rows, i / group, tile);
    if (~seen) hide(row, seen);
    if (seen) {
      soften<Product, 1>(softened(i), 1.0f);
    } else {
      scratch.rescale[i] = 1.0f;
      std::fill(row, row + kTile, 0.0f);
    }
    ++i;
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
