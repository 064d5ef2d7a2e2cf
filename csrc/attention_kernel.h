// The arithmetic of paged_attention, included once per instruction set: SPECDEC_ISA names the namespace, SPECDEC_LANES
// the floats of its vectors. It has to be compiled as a whole for each, because GCC splits a vector type for the
// instruction set of the function it stands in before it inlines that function.
//
// Every sum has one fixed order whatever the number of rows: a score adds its products chunk by chunk of head_dim, an
// output its weighted values tile by tile of positions, each from the lowest on, and position j of a tile always stands
// in the same vector lane when weights are summed. So how rows are blocked, here by kRowBlock, changes no bit. Chunks and
// tiles are summed by themselves first: one long chain would lose two to three times as much to rounding.

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kLanes = SPECDEC_LANES;
constexpr int kVectors = 4;                             // vectors side by side in a block of a product
constexpr std::int64_t kChunk = 64;                     // of head_dim: keys that stay in the first-level cache
constexpr int kRowBlock = SPECDEC_LANES == 16 ? 6 : 2;  // rows of a block: as many as leave registers for operands

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Single __attribute__((vector_size(sizeof(float))));
typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef std::int32_t QuadIndex __attribute__((vector_size(4 * sizeof(std::int32_t))));

// exp(x) for x <= 0 within 2 units in the last place. A NaN stays a NaN, and -infinity gives exactly 0.
SPECDEC_INLINE float exp_nonpositive(float x) {
  float shifted;
  const float e = exp_remainder(x < -87.0f ? -87.0f : x, shifted);  // 2^-126: below it nothing is left of a softmax term
  const std::uint32_t exponent = (bit_cast<std::uint32_t>(shifted) + 127u) << 23;
  return x < -87.0f ? 0.0f : e * bit_cast<float>(exponent);
}

template <typename V>
SPECDEC_INLINE V load_vector(const float* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
SPECDEC_INLINE void store_vector(float* to, V vector) {
  std::memcpy(to, &vector, sizeof(V));
}

// One factor of a product: rows of floats, `stride` apart.
struct Matrix {
  float* data;
  std::int64_t stride;
};

// What a product is added to: nothing, what stands there, or that times a factor.
enum class Start { kZero, kSum, kScaled };

// c[i, :] = start + sum over k in [first, last) of a[i, k] * row(k)[:], for kRows rows and kCount vectors of columns.
template <int kRows, int kCount, typename V, typename Row>
SPECDEC_INLINE void product_block(Matrix c, Start start, const float* factor, Matrix a, std::int64_t first,
                                  std::int64_t last, Row row) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  V sums[kRows][kCount] = {};
  for (std::int64_t k = first; k < last; ++k) {
    const float* operand = row(k);
    V operands[kCount];
    for (int v = 0; v < kCount; ++v) operands[v] = load_vector<V>(operand + v * lanes);
    for (int i = 0; i < kRows; ++i) {
      const float weight = a.data[i * a.stride + k];
      for (int v = 0; v < kCount; ++v) sums[i][v] += weight * operands[v];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kCount; ++v) {
      float* to = c.data + i * c.stride + v * lanes;
      if (start == Start::kSum) sums[i][v] += load_vector<V>(to);
      if (start == Start::kScaled) sums[i][v] += load_vector<V>(to) * factor[i];
      store_vector(to, sums[i][v]);
    }
  }
}

// The same for any number of rows.
template <int kCount, typename V, typename Row>
SPECDEC_INLINE void product_rows(Matrix c, Start start, const float* factor, Matrix a, std::int64_t num_rows,
                                 std::int64_t first, std::int64_t last, Row row) {
  std::int64_t i = 0;
  const auto at = [&](Matrix m) { return Matrix{m.data + i * m.stride, m.stride}; };
  for (; i + kRowBlock <= num_rows; i += kRowBlock) {
    product_block<kRowBlock, kCount, V>(at(c), start, factor + i, at(a), first, last, row);
  }
  for (; i + 2 <= num_rows; i += 2) product_block<2, kCount, V>(at(c), start, factor + i, at(a), first, last, row);
  for (; i < num_rows; ++i) product_block<1, kCount, V>(at(c), start, factor + i, at(a), first, last, row);
}

// Transpose 4 rows of 4 floats.
SPECDEC_INLINE void transpose(Quad (&m)[4]) {
  const Quad low01 = __builtin_shuffle(m[0], m[1], QuadIndex{0, 4, 1, 5});
  const Quad high01 = __builtin_shuffle(m[0], m[1], QuadIndex{2, 6, 3, 7});
  const Quad low23 = __builtin_shuffle(m[2], m[3], QuadIndex{0, 4, 1, 5});
  const Quad high23 = __builtin_shuffle(m[2], m[3], QuadIndex{2, 6, 3, 7});
  m[0] = __builtin_shuffle(low01, low23, QuadIndex{0, 1, 4, 5});
  m[1] = __builtin_shuffle(low01, low23, QuadIndex{2, 3, 6, 7});
  m[2] = __builtin_shuffle(high01, high23, QuadIndex{0, 1, 4, 5});
  m[3] = __builtin_shuffle(high01, high23, QuadIndex{2, 3, 6, 7});
}

// Fold a tile's scores into the running softmax of one row (FlashAttention, arXiv 2205.14135, algorithm 1): scores
// become weights, -infinity the weight 0. Returns the factor that what was summed before must be multiplied by.
SPECDEC_INLINE float soften(float* scores, float& maximum, float& sum) {
  float highest = maximum;
#pragma omp simd reduction(max : highest)
  for (std::int64_t j = 0; j < kTile; ++j) highest = scores[j] > highest ? scores[j] : highest;
  const float rescale = exp_nonpositive(maximum - highest);
  float added = 0.0f;
#pragma omp simd reduction(+ : added)
  for (std::int64_t j = 0; j < kTile; ++j) {
    scores[j] = exp_nonpositive(scores[j] - highest);
    added += scores[j];
  }
  maximum = highest;
  sum = sum * rescale + added;
  return rescale;
}

template <typename Type>
SPECDEC_INLINE Quad load_quad(const typename Type::Storage* from) {
  Quad quad;
  for (int i = 0; i < 4; ++i) quad[i] = Type::load(from[i]);
  return quad;
}

// Keys of positions [first, last), transposed to [head_dim, kTile], and values as rows of fp32. A value that is not
// finite would spoil rows that do not see it, since a weight of 0 does not hide it: such values are set to 0 and
// returned as bits, and `hide` spoils the score of whoever sees them.
template <typename Type>
SPECDEC_INLINE std::uint64_t load_tile(const PagedAttentionArgs& args, Scratch& scratch, const Task& task,
                                       std::int64_t first, std::int64_t last) {
  using Storage = typename Type::Storage;
  const std::int32_t* pages = args.block_table + task.sequence * args.max_pages;
  const std::int64_t head_dim = args.head_dim, tile = first / kTile * kTile;
  const auto head_at = [&](std::int64_t position) {
    const std::int64_t slot = pages[position / args.page_size] * args.page_size + position % args.page_size;
    return slot * args.num_kv_heads + task.kv_head;
  };
  const Storage* keys[kTile];
  for (std::int64_t j = 0; j < kTile; ++j) {
    // A position outside repeats its neighbour: its score is hidden afterwards, and it is read already.
    keys[j] = static_cast<const Storage*>(args.key_cache) + head_at(std::clamp(tile + j, first, last - 1)) * head_dim;
  }
  for (std::int64_t j = 0; j < kTile; j += 4) {
    std::int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4) {
      Quad block[4];
      for (int i = 0; i < 4; ++i) block[i] = load_quad<Type>(keys[j + i] + d);
      transpose(block);
      for (int i = 0; i < 4; ++i) store_vector(scratch.keys.data() + (d + i) * kTile + j, block[i]);
    }
    for (; d < head_dim; ++d) {
      for (int i = 0; i < 4; ++i) scratch.keys[d * kTile + j + i] = Type::load(keys[j + i][d]);
    }
  }
  const std::int64_t value_dim = args.value_dim;
  std::uint64_t broken = 0;
  for (std::int64_t position = first; position < last; ++position) {
    const Storage* value = static_cast<const Storage*>(args.value_cache) + head_at(position) * value_dim;
    float* row = scratch.values.data() + (position - tile) * value_dim;
    float spoilt = 0.0f;  // 0 * x is 0 unless x is infinite or NaN
#pragma omp simd reduction(+ : spoilt)
    for (std::int64_t d = 0; d < value_dim; ++d) {
      row[d] = Type::load(value[d]);
      spoilt += row[d] * 0.0f;
    }
    if (spoilt == 0.0f) continue;
    broken |= std::uint64_t{1} << (position - tile);
    std::fill_n(row, value_dim, 0.0f);
  }
  return broken;
}

SPECDEC_INLINE void hide(float* scores, std::uint64_t seen, std::uint64_t broken) {
  for (std::int64_t j = 0; j < kTile; ++j) {
    if (!(seen >> j & 1)) scores[j] = -kInfinity;
    if (seen & broken & std::uint64_t{1} << j) scores[j] = std::numeric_limits<float>::quiet_NaN();
  }
}

// Fold positions [first, last) of a tile, which is loaded, into all vectors of the task.
SPECDEC_INLINE void fold_tile(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t first,
                              std::int64_t last, std::uint64_t broken) {
  const std::int64_t head_dim = args.head_dim, value_dim = args.value_dim;
  const std::int64_t group = args.num_heads / args.num_kv_heads, tile = first / kTile * kTile;
  const Matrix query{scratch.query.data(), head_dim}, scores{scratch.scores.data(), kTile};
  for (std::int64_t d = 0; d < head_dim; d += kChunk) {
    for (std::int64_t j = 0; j < kTile; j += kVectors * kLanes) {
      const float* keys = scratch.keys.data() + j;
      product_rows<kVectors, Vector>(Matrix{scores.data + j, kTile}, d ? Start::kSum : Start::kZero, nullptr, query,
                                     rows.num_vectors, d, std::min(d + kChunk, head_dim),
                                     [keys](std::int64_t k) { return keys + k * kTile; });
    }
  }
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    float* row = scores.data + i * kTile;
    if (args.softcap > 0) {
      for (std::int64_t j = 0; j < kTile; ++j) row[j] = args.softcap * std::tanh(row[j] / args.softcap);
    }
    const std::uint64_t seen = visible(args, rows, i / group, tile);
    if (~seen | broken) hide(row, seen, broken);
    scratch.rescale[i] = seen ? soften(row, scratch.maximum[i], scratch.sum[i]) : 1.0f;
    if (!seen) std::fill(row, row + kTile, 0.0f);
  }
  const auto add_values = [&](std::int64_t d, auto count, auto vector) {
    const float* values = scratch.values.data() + d;
    product_rows<decltype(count)::value, decltype(vector)>(
        Matrix{scratch.accumulated.data() + d, value_dim}, Start::kScaled, scratch.rescale.data(), scores,
        rows.num_vectors, first - tile, last - tile,
        [values, value_dim](std::int64_t j) { return values + j * value_dim; });
  };
  std::int64_t d = 0;
  for (; d + kVectors * kLanes <= value_dim; d += kVectors * kLanes) {
    add_values(d, std::integral_constant<int, kVectors>{}, Vector{});
  }
  for (; d + kLanes <= value_dim; d += kLanes) add_values(d, std::integral_constant<int, 1>{}, Vector{});
  for (; d < value_dim; ++d) add_values(d, std::integral_constant<int, 1>{}, Single{});
}

template <typename Type>
void run_task(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads;
  const std::int64_t head_dim = args.head_dim, value_dim = args.value_dim, first_head = task.kv_head * group;
  const std::int64_t begin = args.cu_seqlens_q[task.sequence];
  const std::int64_t prefix = args.seqused_k[task.sequence] - (args.cu_seqlens_q[task.sequence + 1] - begin);
  const Rows rows{begin + task.first_row, prefix, task.first_row, task.num_rows * group};
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    const Storage* query = static_cast<const Storage*>(args.query) +
                           (rows.first_query + i / group) * args.stride_query_row +
                           (first_head + i % group) * args.stride_query_head;
    for (std::int64_t d = 0; d < head_dim; ++d) scratch.query[i * head_dim + d] = Type::load(query[d]) * args.scale;
    // A sink is what the softmax has seen before the first entry: e^(sink - sink) = 1, and no value.
    scratch.maximum[i] = args.sinks ? sink_of(args, first_head + i % group) : -kInfinity;
    scratch.sum[i] = args.sinks ? 1.0f : 0.0f;
  }
  std::fill_n(scratch.accumulated.begin(), rows.num_vectors * value_dim, 0.0f);
  const std::int64_t context = prefix + task.first_row + task.num_rows;  // positions the last row sees at most
  // In a tree a row's position is its depth's; none lies before the first row's.
  const std::int64_t begins = first_visible(args, args.tree_mask ? prefix : prefix + task.first_row);
  for (std::int64_t tile = begins / kTile * kTile; tile < context; tile += kTile) {
    const std::int64_t first = std::max(tile, begins), last = std::min(tile + kTile, context);
    const std::uint64_t broken = load_tile<Type>(args, scratch, task, first, last);
    fold_tile(args, scratch, rows, first, last, broken);
  }
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    Storage* out = static_cast<Storage*>(args.out) +
                   ((rows.first_query + i / group) * args.num_heads + first_head + i % group) * value_dim;
    for (std::int64_t d = 0; d < value_dim; ++d) {
      out[d] = Type::store(scratch.accumulated[i * value_dim + d] / scratch.sum[i]);
    }
  }
}

const std::array<void (*)(const PagedAttentionArgs&, Scratch&, const Task&), 3> kRun = {
    run_task<Float32>, run_task<Float16>, run_task<BFloat16>};  // by DType

}  // namespace SPECDEC_ISA
}  // namespace specdec

#undef SPECDEC_ISA
#undef SPECDEC_LANES
