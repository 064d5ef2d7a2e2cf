// The products of paged_attention for tasks of few vectors, as in decoding. They read keys and values where these are
// stored, because laying out a tile (attention_tile.h) takes longer than multiplying few vectors with it. Every sum has the
// order of attention_kernel.h, so both ways give the same bits. Included once per instruction set.

namespace specdec {
namespace SPECDEC_ISA {

constexpr std::int64_t kFewVectors = kRowBlock;  // at most so many, because every block of vectors reads the tile again

// Words w to w + kLanes - 1 of kLanes rows: out[i] holds word w + i of each. Heads of one position lie apart by a power of
// two, so that the lines of many positions exclude one another from the first-level cache; here each line is read once.
SPECDEC_INLINE void transpose_square(const char* const* rows, std::int64_t w, Words (&out)[kLanes]) {
#if SPECDEC_LANES == 16
  Vector square[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = load_vector(rows[i] + 4 * w);
  transpose(square);
  for (int i = 0; i < kLanes; ++i) out[i] = reinterpret_cast<Words>(square[i]);
#else
  for (int i = 0; i < kLanes; i += 4) {
    Words quad[4];
    transpose(rows, w + i, quad);
    for (int j = 0; j < 4; ++j) out[i + j] = quad[j];
  }
#endif
}

// Add the products of words w to w + kLanes - 1 of kRows queries and kLanes keys.
template <typename Type, typename Product, int kRows>
SPECDEC_INLINE void add_words(Vector (&sums)[kRows], Matrix query, const char* const* keys, const char* const* next,
                              std::int64_t w) {
  constexpr int kCount = Product::kNumbers == 1 ? 4 / sizeof(typename Type::Storage) : 1;  // operands in a word
  Words words[kLanes];
  for (int i = 0; i < kLanes; ++i) prefetch(next[i] + 4 * w, kLanes * 4);
  transpose_square(keys, w, words);
  for (int j = 0; j < kLanes; ++j) {
    Vector operands[kCount];
    if constexpr (Product::kNumbers == 1) {
      widen(Type{}, words[j], operands);
    } else {
      operands[0] = reinterpret_cast<Vector>(words[j]);
    }
    for (int n = 0; n < kCount; ++n) {
      for (int i = 0; i < kRows; ++i) {
        const auto weight = load_as<typename Product::Word>(query.data + i * query.stride + (w + j) * kCount + n);
        sums[i] = Product::add(sums[i], weight, operands[n]);
      }
    }
  }
}

// Scores of kRows queries for kLanes keys of `num_words` words. Chunks alternate in pairs, so that one's additions do not
// wait for those of the other.
template <typename Type, typename Product, int kRows>
SPECDEC_INLINE void score_block(Matrix scores, Matrix query, const char* const* keys, const char* const* next,
                                std::int64_t num_words) {
  constexpr std::int64_t kWords = kChunkBytes / 4;
  Vector totals[kRows] = {};
  std::int64_t begin = 0;
  for (; begin + 2 * kWords <= num_words; begin += 2 * kWords) {
    Vector sums[2][kRows] = {};
    for (std::int64_t w = begin; w < begin + kWords; w += kLanes) {
      add_words<Type, Product, kRows>(sums[0], query, keys, next, w);
      add_words<Type, Product, kRows>(sums[1], query, keys, next, w + kWords);
    }
    for (int i = 0; i < kRows; ++i) totals[i] = begin ? sums[0][i] + totals[i] : sums[0][i];
    for (int i = 0; i < kRows; ++i) totals[i] = sums[1][i] + totals[i];
  }
  for (; begin < num_words; begin += kWords) {
    Vector sums[kRows] = {};
    for (std::int64_t w = begin; w < std::min(begin + kWords, num_words); w += kLanes) {
      add_words<Type, Product, kRows>(sums, query, keys, next, w);
    }
    for (int i = 0; i < kRows; ++i) totals[i] = begin ? sums[i] + totals[i] : sums[i];
  }
  for (int i = 0; i < kRows; ++i) store_as(scores.data + i * scores.stride, totals[i]);
}

// The columns that are read together, and the order in which a block keeps its sums of them.
template <typename Type, typename Product>
struct ValueUnit {
  static constexpr int kCount = 1;
  SPECDEC_INLINE static void load(const typename Type::Storage* const* rows, std::int64_t d, Vector* out) {
    if constexpr (std::is_same_v<Type, Float32>) {
      out[0] = load_as<Vector>(rows[0] + d);
    } else if constexpr (std::is_same_v<Type, BFloat16>) {
      out[0] = reinterpret_cast<Vector>(__builtin_convertvector(load_as<Halves>(rows[0] + d), Words) << 16);
    } else {
      for (int lane = 0; lane < kLanes; ++lane) out[0][lane] = Type::load(rows[0][d + lane]);
    }
  }
  SPECDEC_INLINE static void load_sums(const float* from, Vector* sums) { sums[0] = load_as<Vector>(from); }
  SPECDEC_INLINE static void store_sums(float* to, const Vector* sums) { store_as(to, sums[0]); }
};

#ifdef SPECDEC_DOT_BF16
// Two rows of 32 columns. Interleaving them within 128 bits leaves columns 0-3, 8-11, 16-19 and 24-27 in the first vector.
template <>
struct ValueUnit<BFloat16, Pairs> {
  static constexpr int kCount = 2;
  SPECDEC_INLINE static void load(const std::uint16_t* const* rows, std::int64_t d, Vector* out) {
    const __m512i even = load_as<__m512i>(rows[0] + d), odd = load_as<__m512i>(rows[1] + d);
    out[0] = reinterpret_cast<Vector>(_mm512_unpacklo_epi16(even, odd));
    out[1] = reinterpret_cast<Vector>(_mm512_unpackhi_epi16(even, odd));
  }
  SPECDEC_INLINE static void load_sums(const float* from, Vector* sums) {
    const __m512 low = load_as<__m512>(from), high = load_as<__m512>(from + kLanes);
    sums[0] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(low, high, 0x88));
    sums[1] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(low, high, 0xdd));
  }
  SPECDEC_INLINE static void store_sums(float* to, const Vector* sums) {
    const __m512d first = reinterpret_cast<__m512d>(sums[0]), second = reinterpret_cast<__m512d>(sums[1]);
    store_as(to, _mm512_permutex2var_pd(first, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second));
    store_as(to + kLanes, _mm512_permutex2var_pd(first, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), second));
  }
};
#endif

// sums[i, :] = sums[i, :] * factor[i] + weighted values of words [first, last) of positions, for kRows vectors and kCount
// vectors of columns from column d on. Unless the values are `known_finite`, returns false and writes nothing if the first
// vector's weighted values are not finite. If they are, then so are the values: not even a weight of 0 makes the product of
// another value finite.
template <typename Type, typename Product, int kRows, int kCount>
SPECDEC_INLINE bool value_block(Matrix sums, const float* factor, Matrix weights, const typename Type::Storage* const* values,
                                const typename Type::Storage* const* next, std::int64_t d, std::int64_t first,
                                std::int64_t last, bool known_finite) {
  using Unit = ValueUnit<Type, Product>;
  Vector added[kRows][kCount] = {};
  for (std::int64_t k = first; k < last; ++k) {
    Vector operands[kCount];
    for (int n = 0; n < Product::kNumbers; ++n) prefetch(next[k * Product::kNumbers + n] + d, kCount * kLanes);
    for (int v = 0; v < kCount; v += Unit::kCount) Unit::load(values + k * Product::kNumbers, d + v * kLanes, operands + v);
    for (int i = 0; i < kRows; ++i) {
      const auto weight = load_as<typename Product::Word>(weights.data + i * weights.stride + k);
      for (int v = 0; v < kCount; ++v) added[i][v] = Product::add(added[i][v], weight, operands[v]);
    }
  }
  Vector differences = {};
  for (int v = 0; v < kCount; ++v) differences += added[0][v] - added[0][v];  // 0, or NaN if it is not finite
  float difference = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) difference += differences[lane];
  if (!known_finite && !(difference == 0.0f)) return false;
  for (int i = 0; i < kRows; ++i) {
    float* to = sums.data + i * sums.stride + d;
    for (int v = 0; v < kCount; v += Unit::kCount) {
      Vector before[Unit::kCount];
      Unit::load_sums(to + v * kLanes, before);
      for (int u = 0; u < Unit::kCount; ++u) added[i][v + u] = multiply_add(before[u], splat(factor[i]), added[i][v + u]);
      Unit::store_sums(to + v * kLanes, added[i] + v);
    }
  }
  return true;
}

// Whether the functions of this file serve a task: it has few vectors, and heads are whole units of what is read together.
template <typename Type, typename Product>
SPECDEC_INLINE bool are_few(const PagedAttentionArgs& args, std::int64_t num_vectors) {
  constexpr std::int64_t square = 4 * kLanes / sizeof(typename Type::Storage), unit = ValueUnit<Type, Product>::kCount * kLanes;
  constexpr bool converts_in_lanes = kLanes == 16 || !std::is_same_v<Type, Float16>;
  return converts_in_lanes && num_vectors <= kFewVectors && args.head_dim % square == 0 && args.value_dim % unit == 0;
}

// Call body(number of vectors as a constant, first vector) for blocks of few vectors.
template <typename Body>
SPECDEC_INLINE void for_few_blocks(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  if constexpr (kRowBlock > 4) {
    for (; i + kRowBlock <= end; i += kRowBlock) body(std::integral_constant<int, kRowBlock>{}, i);
    for (; i + 4 <= end; i += 4) body(std::integral_constant<int, 4>{}, i);
  }
  for (; i + 2 <= end; i += 2) body(std::integral_constant<int, 2>{}, i);
  for (; i < end; ++i) body(std::integral_constant<int, 1>{}, i);
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
