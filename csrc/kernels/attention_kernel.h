// The arithmetic of paged_attention, included once per instruction set: SPECDEC_ISA names the namespace, SPECDEC_LANES
// the number of floats in its vectors. Each version has to be compiled as a whole, because GCC splits a vector type for the
// instruction set of the function that contains it before it inlines that function.
//
// Every sum has one fixed order, whatever the number of rows. A score adds its products chunk by chunk of head_dim; an
// output adds its weighted values tile by tile of positions. Both begin at the lowest index. When weights are summed,
// position j of a tile is always in the same vector lane. So no bit depends on how rows are divided into blocks and tasks,
// nor on whether positions that a row does not see are skipped: their weight is 0. Every chunk and every tile has a sum of
// its own, because one long chain would lose two to three times as much to rounding.

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kVectors = 4;  // adjacent vectors of columns in a block of a product
constexpr std::int64_t kColumns = kVectors * kLanes;
constexpr std::int64_t kChunk = 64;                     // numbers of head_dim whose keys stay in the first-level cache
constexpr int kRowBlock = SPECDEC_LANES == 16 ? 6 : 2;  // rows of a block: as many as leave registers for the operands

// exp(x) for x <= 0 within 2 units in the last place. A NaN stays a NaN, and -infinity gives exactly 0.
SPECDEC_INLINE float exp_nonpositive(float x) {
  float shifted;
  const float e = exp_remainder(x < -87.0f ? -87.0f : x, shifted);  // 2^-126: below it nothing is left of a softmax term
  const std::uint32_t exponent = (bit_cast<std::uint32_t>(shifted) + 127u) << 23;
  return x < -87.0f ? 0.0f : e * bit_cast<float>(exponent);
}

// tanh(x) within a few units in the last place. Near 0, where 1 - 2 / (e^2x + 1) would cancel, it is an odd polynomial
// (coefficients of the Cephes library, tanhf). It has no branch, so that loops around it vectorise.
SPECDEC_INLINE float tanh_of(float x) {
  const float square = x * x, magnitude = std::fabs(x);
  float series = -5.70498872745e-3f * square + 2.06390887954e-2f;
  series = series * square - 5.37397155531e-2f;
  series = series * square + 1.33314422036e-1f;
  series = series * square - 3.33332819422e-1f;
  const float near = series * square * x + x;
  const float e = exp_nonpositive(-2.0f * magnitude);  // tanh |x| = (1 - e) / (1 + e)
  const float far = (1.0f - e) / (1.0f + e);
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Rows of words, `stride` apart.
struct Matrix {
  float* data;
  std::int64_t stride;
};

// What a product is added to: zero, the number at the output, or that number times a factor.
enum class Start { kZero, kSum, kScaled };

// c[i, :] = start + sum over words k in [first, last) of a[i, k] * b[k, :], for kRows rows and kCount vectors of columns.
template <typename Product, int kRows, int kCount>
SPECDEC_INLINE void product_block(Matrix c, Start start, const float* factor, Matrix a, Matrix b, std::int64_t first,
                                  std::int64_t last) {
  Vector sums[kRows][kCount] = {};
  for (std::int64_t k = first; k < last; ++k) {
    Vector operands[kCount];
    for (int v = 0; v < kCount; ++v) operands[v] = load_as<Vector>(b.data + k * b.stride + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const auto weight = load_as<typename Product::Word>(a.data + i * a.stride + k);
      for (int v = 0; v < kCount; ++v) sums[i][v] = Product::add(sums[i][v], weight, operands[v]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kCount; ++v) {
      float* to = c.data + i * c.stride + v * kLanes;
      if (start == Start::kSum) sums[i][v] += load_as<Vector>(to);
      if (start == Start::kScaled) sums[i][v] += load_as<Vector>(to) * factor[i];
      store_as(to, sums[i][v]);
    }
  }
}

// The same for up to kVectors vectors.
template <typename Product, int kRows>
SPECDEC_INLINE void product_columns(std::int64_t count, Matrix c, Start start, const float* factor, Matrix a, Matrix b,
                                    std::int64_t first, std::int64_t last) {
  switch (count) {
    case 1: return product_block<Product, kRows, 1>(c, start, factor, a, b, first, last);
    case 2: return product_block<Product, kRows, 2>(c, start, factor, a, b, first, last);
    case 3: return product_block<Product, kRows, 3>(c, start, factor, a, b, first, last);
    default: return product_block<Product, kRows, kVectors>(c, start, factor, a, b, first, last);
  }
}

// Call body(number of rows as a constant, first row) for blocks of rows.
template <typename Body>
SPECDEC_INLINE void for_row_blocks(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  for (; i + kRowBlock <= end; i += kRowBlock) body(std::integral_constant<int, kRowBlock>{}, i);
  for (; i + 2 <= end; i += 2) body(std::integral_constant<int, 2>{}, i);
  for (; i < end; ++i) body(std::integral_constant<int, 1>{}, i);
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

// Lay out positions [first, last). A value that is not finite would invalidate rows that do not see it, because a weight of
// 0 does not hide it. So such values are set to 0, and their positions are returned as bits; `hide` then invalidates the
// scores of the rows that see these positions.
template <typename Type, typename Product>
SPECDEC_INLINE std::uint64_t load_tile(const PagedAttentionArgs& args, Scratch& scratch, const Task& task,
                                       std::int64_t first, std::int64_t last) {
  using Storage = typename Type::Storage;
  const std::int64_t value_dim = args.value_dim, tile = first / kTile * kTile, begin = first - tile, end = last - tile;
  // Keys are laid out in whole vectors. A position outside of [begin, end) repeats its neighbour, which is read anyway; its
  // score is hidden afterwards.
  const std::int64_t first_lane = begin / kLanes * kLanes, end_lane = (end + kLanes - 1) / kLanes * kLanes;
  const char* keys[kTile];
  const Storage* values[kTile];
  const Storage* const zeros = reinterpret_cast<const Storage*>(scratch.zeros.data());
  Entries entries(args, task, first);
  for (std::int64_t j = begin; j < end; ++j) {
    const std::int64_t entry = entries.next();
    keys[j] = static_cast<const char*>(args.key_cache) + entry * args.head_dim * static_cast<std::int64_t>(sizeof(Storage));
    values[j] = static_cast<const Storage*>(args.value_cache) + entry * value_dim;
  }
  std::uint64_t broken = 0;
  if (!all_finite<Type>(values + begin, end - begin, value_dim)) {
    for (std::int64_t j = begin; j < end; ++j) {
      if (all_finite<Type>(values + j, 1, value_dim)) continue;
      broken |= std::uint64_t{1} << j;
      values[j] = zeros;
    }
  }
  std::fill(keys + first_lane, keys + begin, keys[begin]);
  std::fill(keys + end, keys + end_lane, keys[end - 1]);
  constexpr std::int64_t step = Product::kNumbers;
  if (begin % step != 0) values[begin - 1] = zeros;
  if (end % step != 0) values[end] = zeros;
  load_keys<Type, Product>(keys, first_lane, end_lane, args.head_dim, scratch.keys.data());
  for (std::int64_t j = begin / step * step; j < end; j += step) {
    load_values<Type, Product>(values + j, value_dim, scratch.values.data() + j / step * scratch.columns);
  }
  return broken;
}

SPECDEC_INLINE void hide(float* scores, std::uint64_t seen, std::uint64_t broken) {
  for (std::int64_t j = 0; j < kTile; ++j) {
    if (!(seen >> j & 1)) scores[j] = -kInfinity;
    if (seen & broken & std::uint64_t{1} << j) scores[j] = std::numeric_limits<float>::quiet_NaN();
  }
}

// Turn the scores of vectors [begin, end) for a tile into weights.
template <typename Product>
SPECDEC_INLINE void weigh(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t tile,
                          std::int64_t begin, std::int64_t end, std::uint64_t broken) {
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
    if (~seen | broken) hide(row, seen, broken);
    scratch.rescale[i] = seen ? soften<Product>(row, scratch.maximum[i], scratch.sum[i]) : 1.0f;
    if (!seen) std::fill(row, row + kTile, 0.0f);
  }
}

// Fold positions [first, last) of the loaded tile into the task's vectors that see at least one of them.
template <typename Product>
SPECDEC_INLINE void fold_tile(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t first,
                              std::int64_t last, std::uint64_t broken) {
  const std::int64_t group = args.num_heads / args.num_kv_heads, tile = first / kTile * kTile;
  const auto [first_row, end_row] = rows_that_see(args, rows, rows.num_vectors / group, tile);
  const std::int64_t begin = first_row * group, end = end_row * group;
  constexpr std::int64_t step = Product::kNumbers;
  const std::int64_t words = (args.head_dim + step - 1) / step, chunk = kChunk / step;
  const Matrix query{scratch.query.data(), scratch.words}, scores{scratch.scores.data(), kTile};
  const Matrix keys{scratch.keys.data(), kTile}, values{scratch.values.data(), scratch.columns};
  const Matrix sums{scratch.accumulated.data(), scratch.columns};
  const auto at = [](Matrix m, std::int64_t row, std::int64_t column) {
    return Matrix{m.data + row * m.stride + column, m.stride};
  };
  for (std::int64_t k = 0; k < words; k += chunk) {
    for_row_blocks(begin, end, [&](auto count, std::int64_t i) {
      const std::int64_t seen = std::min(last, end_seen(rows, (i + count - 1) / group)) - tile;
      for (std::int64_t j = 0; j < seen; j += kColumns) {
        product_columns<Product, count()>((std::min(seen - j, kColumns) + kLanes - 1) / kLanes, at(scores, i, j),
                                          k ? Start::kSum : Start::kZero, nullptr, at(query, i, 0), at(keys, 0, j), k,
                                          std::min(k + chunk, words));
      }
    });
  }
  weigh<Product>(args, scratch, rows, tile, begin, end, broken);
  for (std::int64_t d = 0; d < scratch.columns; d += kColumns) {
    const std::int64_t vectors = std::min(scratch.columns - d, kColumns) / kLanes;
    for_row_blocks(begin, end, [&](auto count, std::int64_t i) {
      const std::int64_t from = std::max(first, first_seen(args, rows, i / group)) - tile;
      const std::int64_t seen = std::min(last, end_seen(rows, (i + count - 1) / group)) - tile;
      product_columns<Product, count()>(vectors, at(sums, i, d), Start::kScaled, scratch.rescale.data() + i,
                                        at(scores, i, 0), at(values, 0, d), from / step, (seen + step - 1) / step);
    });
  }
}

// Set the queries and sums of a task's vectors to their initial values.
template <typename Type, typename Product>
SPECDEC_INLINE void load_queries(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows,
                                 std::int64_t first_head) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads, head_dim = args.head_dim;
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    const std::int64_t head = first_head + i % group;
    const Storage* query = static_cast<const Storage*>(args.query) +
                           (rows.first_query + i / group) * args.stride_query_row + head * args.stride_query_head;
    float* to = scratch.query.data() + i * scratch.words;
    if constexpr (Product::kNumbers == 2) {
      to[scratch.words - 1] = 0.0f;  // an odd head_dim fills half of the last word
      std::memcpy(to, query, static_cast<std::size_t>(head_dim) * sizeof(Storage));
    } else {
      for (std::int64_t d = 0; d < head_dim; ++d) to[d] = Type::load(query[d]) * args.scale;
    }
    // A sink enters the softmax before the first entry: a weight of e^(sink - sink) = 1, and no value.
    scratch.maximum[i] = args.sinks ? sink_of(args, head) : -kInfinity;
    scratch.sum[i] = args.sinks ? 1.0f : 0.0f;
  }
  std::fill_n(scratch.accumulated.begin(), rows.num_vectors * scratch.columns, 0.0f);
}

template <typename Type, typename Product>
void run_task(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads, first_head = task.kv_head * group;
  const std::int64_t begin = args.cu_seqlens_q[task.sequence];
  const std::int64_t prefix = args.seqused_k[task.sequence] - (args.cu_seqlens_q[task.sequence + 1] - begin);
  const Rows rows{begin + task.first_row, prefix, task.first_row, task.num_rows * group};
  load_queries<Type, Product>(args, scratch, rows, first_head);
  const std::int64_t context = prefix + task.first_row + task.num_rows;  // the last row sees at most so many positions
  const std::int64_t begins = first_seen(args, rows, 0);
  for (std::int64_t tile = begins / kTile * kTile; tile < context; tile += kTile) {
    const std::int64_t first = std::max(tile, begins), last = std::min(tile + kTile, context);
    const std::uint64_t broken = load_tile<Type, Product>(args, scratch, task, first, last);
    fold_tile<Product>(args, scratch, rows, first, last, broken);
  }
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    Storage* out = static_cast<Storage*>(args.out) +
                   ((rows.first_query + i / group) * args.num_heads + first_head + i % group) * args.value_dim;
    const float* sums = scratch.accumulated.data() + i * scratch.columns;
    // Plus 0, because the sign of a zero depends on which positions were skipped.
    for (std::int64_t d = 0; d < args.value_dim; ++d) out[d] = Type::store(sums[d] / scratch.sum[i] + 0.0f);
  }
}

#ifdef SPECDEC_DOT_BF16
using ProductOfBFloat16 = Pairs;
#else
using ProductOfBFloat16 = Singles;
#endif

constexpr AttentionKernel kKernel = {
    {run_task<Float32, Singles>, run_task<Float16, Singles>, run_task<BFloat16, ProductOfBFloat16>},  // by DType
    {Singles::kNumbers, Singles::kNumbers, ProductOfBFloat16::kNumbers},
    kLanes};

}  // namespace SPECDEC_ISA
}  // namespace specdec
