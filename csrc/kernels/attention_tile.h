// How paged_attention finds and lays out a tile of keys and values, included once per instruction set, before
// attention_kernel.h.
//
// A word is the operand of one multiplication in a lane: a float, or a pair of bf16 numbers where SPECDEC_DOT_BF16 says
// that the processor multiplies pairs. Keys are stored as [words of head_dim, kTile], values as [words of positions,
// columns].

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vectors.h"

#include "kernels/transposition.h"

// Single numbers, as fp32.
struct Singles {
  using Word = float;
  static constexpr std::int64_t kNumbers = 1;  // in a word
  static constexpr bool kTiles = false;
  SPECDEC_INLINE static Vector add(Vector sum, Word weight, Vector operand) { return multiply_add(splat(weight), operand, sum); }
};

#ifdef SPECDEC_DOT_BF16
// Pairs of bf16 numbers; one instruction adds both products of a lane.
struct Pairs {
  using Word = std::uint32_t;
  static constexpr std::int64_t kNumbers = 2;
  static constexpr bool kTiles = false;
  SPECDEC_INLINE static Vector add(Vector sum, Word weight, Vector operand) {
    const __m512i weights = _mm512_set1_epi32(static_cast<int>(weight));
    return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(weights),
                                                     reinterpret_cast<__m512bh>(operand)));
  }
};
#endif

// Words w to w + 3 of kLanes rows: out[i] holds word w + i of each.
#if SPECDEC_LANES == 16
SPECDEC_INLINE void transpose(const char* const* rows, std::int64_t w, Words (&out)[4]) {
  __m512 gathered[4], columns[4];
  for (int i = 0; i < 4; ++i) {
    const auto quad = [&](int g) { return load_as<__m128>(rows[4 * g + i] + 4 * w); };
    const __m512 two = _mm512_insertf32x4(_mm512_castps128_ps512(quad(0)), quad(1), 1);
    gathered[i] = _mm512_insertf32x4(_mm512_insertf32x4(two, quad(2), 2), quad(3), 3);
  }
  transpose_quarters(gathered, columns);
  for (int k = 0; k < 4; ++k) out[k] = reinterpret_cast<Words>(columns[k]);
}
#elif SPECDEC_LANES == 8
SPECDEC_INLINE void transpose(const char* const* rows, std::int64_t w, Words (&out)[4]) {
  __m256i m[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i low = _mm256_castsi128_si256(load_as<__m128i>(rows[i] + 4 * w));
    m[i] = _mm256_inserti128_si256(low, load_as<__m128i>(rows[4 + i] + 4 * w), 1);
  }
  const __m256i low01 = _mm256_unpacklo_epi32(m[0], m[1]), high01 = _mm256_unpackhi_epi32(m[0], m[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(m[2], m[3]), high23 = _mm256_unpackhi_epi32(m[2], m[3]);
  out[0] = reinterpret_cast<Words>(_mm256_unpacklo_epi64(low01, low23));
  out[1] = reinterpret_cast<Words>(_mm256_unpackhi_epi64(low01, low23));
  out[2] = reinterpret_cast<Words>(_mm256_unpacklo_epi64(high01, high23));
  out[3] = reinterpret_cast<Words>(_mm256_unpackhi_epi64(high01, high23));
}
#else
SPECDEC_INLINE void transpose(const char* const* rows, std::int64_t w, Words (&out)[4]) {
  Words loaded[4];
  for (int j = 0; j < 4; ++j) loaded[j] = load_as<Words>(rows[j] + 4 * w);
  for (int i = 0; i < 4; ++i) out[i] = Words{loaded[0][i], loaded[1][i], loaded[2][i], loaded[3][i]};
}
#endif

// The numbers of each lane's word as fp32, in the order of memory.
SPECDEC_INLINE void widen(Float32, Words words, Vector (&out)[1]) { out[0] = reinterpret_cast<Vector>(words); }

SPECDEC_INLINE void widen(BFloat16, Words words, Vector (&out)[2]) {
  out[0] = reinterpret_cast<Vector>(words << 16);
  out[1] = reinterpret_cast<Vector>(words & 0xffff0000u);
}

SPECDEC_INLINE void widen(Float16, Words words, Vector (&out)[2]) {
#if SPECDEC_LANES == 16
  const __m512i both = reinterpret_cast<__m512i>(words);
  out[0] = reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
  out[1] = reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
#else
  for (int half = 0; half < 2; ++half) {
    for (int lane = 0; lane < kLanes; ++lane) {
      out[half][lane] = Float16::load(static_cast<std::uint16_t>(words[lane] >> 16 * half));
    }
  }
#endif
}

// Write word w of the keys of kLanes positions.
template <typename Type, typename Product>
SPECDEC_INLINE void store_keys(Words words, std::int64_t w, float* to) {
  if constexpr (Product::kNumbers == 1) {
    constexpr std::int64_t numbers = 4 / sizeof(typename Type::Storage);
    Vector widened[numbers];
    widen(Type{}, words, widened);
    for (std::int64_t i = 0; i < numbers; ++i) store_as(to + (w * numbers + i) * kTile, widened[i]);
  } else {
    store_as(to + w * kTile, words);
  }
}

// Lay out the keys at rows [begin, end), whole vectors of positions, [head_dim] numbers each. If head_dim is odd, the last
// word ends with 0.
template <typename Type, typename Product>
SPECDEC_INLINE void load_keys(const char* const* rows, std::int64_t begin, std::int64_t end, std::int64_t head_dim, float* keys) {
  constexpr std::int64_t size = sizeof(typename Type::Storage);
  const std::int64_t bytes = head_dim * size, num_quads = bytes / 16;
  for (std::int64_t j = begin; j < end; j += kLanes) {
    Words words[4];
    for (std::int64_t quad = 0; quad < num_quads; ++quad) {
      transpose(rows + j, 4 * quad, words);
      for (int i = 0; i < 4; ++i) store_keys<Type, Product>(words[i], 4 * quad + i, keys + j);
    }
    if (bytes % 16 == 0) continue;
    char rest[kLanes][16] = {};
    const char* rests[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(rest[lane], rows[j + lane] + 16 * num_quads, static_cast<std::size_t>(bytes % 16));
      rests[lane] = rest[lane];
    }
    transpose(rests, 0, words);
    for (std::int64_t i = 0; 4 * i < bytes % 16; ++i) store_keys<Type, Product>(words[i], 4 * num_quads + i, keys + j);
  }
}

// Returns whether all numbers of `num_rows` rows are finite.
template <typename Type>
SPECDEC_INLINE bool all_finite(const typename Type::Storage* const* rows, std::int64_t num_rows, std::int64_t count) {
  using Bits = std::conditional_t<sizeof(typename Type::Storage) == 4, std::uint32_t, std::uint16_t>;
  constexpr Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr std::int64_t kAtOnce = 64 / sizeof(Bits);  // so that a row is compared in vectors, across which is looked once
  Bits largest[kAtOnce] = {};
  const auto compare = [&largest](const typename Type::Storage* numbers, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const Bits magnitude = static_cast<Bits>(bit_cast<Bits>(numbers[i]) & static_cast<Bits>(~sign));
      largest[i] = magnitude > largest[i] ? magnitude : largest[i];
    }
  };
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::int64_t i = 0;
    for (; i + kAtOnce <= count; i += kAtOnce) compare(rows[row] + i, kAtOnce);
    compare(rows[row] + i, count - i);
  }
  return *std::max_element(largest, largest + kAtOnce) < Type::kInfinity;
}

// Lay out word w of the values: position w * kNumbers and, in a pair, the next one.
template <typename Type, typename Product>
SPECDEC_INLINE void load_values(const typename Type::Storage* const* rows, std::int64_t value_dim, float* to) {
  // Copies, because the loop vectorises only if no store can change them.
  const typename Type::Storage *const even = rows[0], *const odd = rows[Product::kNumbers - 1];
  for (std::int64_t d = 0; d < value_dim; ++d) {
    if constexpr (Product::kNumbers == 1) {
      to[d] = Type::load(even[d]);
    } else {
      const std::uint32_t second = odd[d];
      store_as(to + d, even[d] | second << 16);
    }
  }
}

// Fetch `count` numbers into the second-level cache. The processor itself fetches the entries of the next positions too late:
// only a few lines of a KV head lie side by side. In the first-level cache they would replace those in use.
template <typename Number>
SPECDEC_INLINE void prefetch(const Number* numbers, std::int64_t count) {
  constexpr std::int64_t line = 64 / sizeof(Number);
  for (std::int64_t i = 0; i < count; i += line) __builtin_prefetch(numbers + i, 0, 2);
}

// Where the keys and values of positions [begin, end) of a tile are.
template <typename Type, typename Product>
struct Tile {
  using Storage = typename Type::Storage;
  std::int64_t begin, end;
  std::int64_t first_lane, end_lane;  // the same in whole vectors
  const char* keys[kTile];
  const Storage* values[kTile];

  SPECDEC_INLINE Tile(const PagedAttentionArgs& args, const Scratch& scratch, const Task& task, const Rows& rows,
                      std::int64_t first, std::int64_t last)
      : begin(first % kTile),
        end(begin + last - first),
        first_lane(begin / kLanes * kLanes),
        end_lane((end + kLanes - 1) / kLanes * kLanes) {
    Entries entries(args, task, first);
    for (std::int64_t j = begin; j < end; ++j) {
      std::int64_t entry = entries.next();
      const std::int64_t depth = first + j - begin - rows.prefix;
      if (rows.only != kAll && depth >= 0) entry = entries.at(scratch.path[depth]);
      keys[j] = static_cast<const char*>(args.key_cache) + entry * args.head_dim * static_cast<std::int64_t>(sizeof(Storage));
      values[j] = static_cast<const Storage*>(args.value_cache) + entry * args.value_dim;
    }
    // A position outside of [begin, end) repeats its neighbour. Keys are read in whole vectors; its score is hidden afterwards.
    std::fill(keys, keys + begin, keys[begin]);
    std::fill(keys + end, keys + kTile, keys[end - 1]);
    std::fill(values, values + begin, values[begin]);
    std::fill(values + end, values + kTile, values[end - 1]);
    constexpr std::int64_t step = Product::kNumbers;
    if (begin % step != 0) values[begin - 1] = reinterpret_cast<const Storage*>(scratch.zeros.data());
    if (end % step != 0) values[end] = reinterpret_cast<const Storage*>(scratch.zeros.data());
  }

  // A value that is not finite would invalidate rows that do not see it, because a weight of 0 does not hide it. So zeros
  // take the place of such values, and their positions are returned as bits; `invalidate` then serves the rows that see them.
  SPECDEC_INLINE std::uint64_t replace_broken(std::int64_t value_dim, const Scratch& scratch) {
    if (all_finite<Type>(values + begin, end - begin, value_dim)) return 0;
    std::uint64_t broken = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      if (all_finite<Type>(values + j, 1, value_dim)) continue;
      broken |= std::uint64_t{1} << j;
      values[j] = reinterpret_cast<const Storage*>(scratch.zeros.data());
    }
    return broken;
  }
};

// Lay out a tile for many vectors, and fetch the next one if there is any.
template <typename Type, typename Product>
SPECDEC_INLINE void load_tile(const PagedAttentionArgs& args, Scratch& scratch, const Tile<Type, Product>& tile,
                              const Tile<Type, Product>* next) {
  constexpr std::int64_t step = Product::kNumbers, size = sizeof(typename Type::Storage);
  load_keys<Type, Product>(tile.keys, tile.first_lane, tile.end_lane, args.head_dim, scratch.keys.data());
  for (std::int64_t j = tile.begin / step * step; j < tile.end; j += step) {
    for (std::int64_t i = j; next && i < j + step; ++i) {
      prefetch(next->keys[i], args.head_dim * size);
      prefetch(next->values[i], args.value_dim);
    }
    load_values<Type, Product>(tile.values + j, args.value_dim, scratch.values.data() + j / step * scratch.columns);
  }
}

// The tile of a task that begins at position `first` or contains it, up to position `end`.
template <typename Type, typename Product>
SPECDEC_INLINE Tile<Type, Product> tile_of(const PagedAttentionArgs& args, const Scratch& scratch, const Task& task,
                                           const Rows& rows, std::int64_t first, std::int64_t end) {
  return {args, scratch, task, rows, first, std::min(first / kTile * kTile + kTile, end)};
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
