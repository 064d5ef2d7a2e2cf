// Vectors of one instruction set, and what linear does with them: included by linear_kernel.h, once per instruction set.
//
// A product multiplies kStep inputs with as many weights: in every lane a unit of each, four bytes. A unit is one number
// in fp32, or a pair of bf16 where one instruction multiplies pairs.

#include "kernels/vectors.h"

#include "kernels/transposition.h"

// Units of one fp32 number.
struct Single {
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) { return multiply_add(input, weight, sum); }
  SPECDEC_INLINE static Vector broadcast(const float* unit) { return splat(*unit); }
};

// Units of numbers that are widened to fp32.
template <typename Format>
struct Widened {
  using Storage = typename Format::Storage;
  using Units = Single;
  static constexpr int kStep = kLanes;
  SPECDEC_INLINE static Vector load(const Storage* from) {
    if constexpr (std::is_same_v<Storage, float>) {
      return load_vector(from);  // of a loop over lanes GCC 12 makes copies in memory, which took a single row 1.7 times as long
    } else {
      Vector vector;
      for (int i = 0; i < kLanes; ++i) vector[i] = Format::load(from[i]);
      return vector;
    }
  }
};

#if SPECDEC_LANES == 16
template <>
SPECDEC_INLINE Vector Widened<BFloat16>::load(const std::uint16_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <>
SPECDEC_INLINE Vector Widened<Float16>::load(const std::uint16_t* from) {
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
#elif SPECDEC_LANES == 8
template <>
SPECDEC_INLINE Vector Widened<BFloat16>::load(const std::uint16_t* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <>
SPECDEC_INLINE Vector Widened<Float16>::load(const std::uint16_t* from) {
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#endif

#ifdef SPECDEC_DOT_BF16
// Units of two bf16; one instruction adds both products to a lane.
struct Paired {
  using Storage = std::uint16_t;
  using Units = Paired;
  static constexpr int kStep = 2 * kLanes;
  SPECDEC_INLINE static Vector load(const Storage* from) { return load_vector(from); }
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) {
    return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(input),
                                                     reinterpret_cast<__m512bh>(weight)));
  }
  SPECDEC_INLINE static Vector broadcast(const float* unit) {
    std::int32_t pair;
    std::memcpy(&pair, unit, sizeof(pair));
    return reinterpret_cast<Vector>(_mm512_set1_epi32(pair));
  }
};
using ProductBFloat16 = Paired;
#else
using ProductBFloat16 = Widened<BFloat16>;
#endif

// One step of kStep numbers, of which `count` are read and the others are zero.
template <typename Product>
SPECDEC_INLINE Vector load_some(const typename Product::Storage* from, std::int64_t count) {
  typename Product::Storage step[Product::kStep] = {};
  std::memcpy(step, from, static_cast<std::size_t>(count) * sizeof(step[0]));
  return Product::load(step);
}

#if SPECDEC_LANES == 16
// Loads 16 rows of 16 units, transposed. It loads quarters, because that is cheaper than moving quarters between registers.
SPECDEC_INLINE void load_by_quarters(const float* const rows[kLanes], Vector square[kLanes]) {
  for (int q = 0; q < 4; ++q) {
    const auto quarter = [&](int row) { return _mm_loadu_ps(rows[row] + 4 * q); };
    __m512 gathered[4], columns[4];
    for (int i = 0; i < 4; ++i) {
      gathered[i] = _mm512_castps128_ps512(quarter(i));
      gathered[i] = _mm512_mask_broadcast_f32x4(gathered[i], 0x00f0, quarter(4 + i));
      gathered[i] = _mm512_mask_broadcast_f32x4(gathered[i], 0x0f00, quarter(8 + i));
      gathered[i] = _mm512_mask_broadcast_f32x4(gathered[i], 0xf000, quarter(12 + i));
    }
    transpose_quarters(gathered, columns);
    for (int k = 0; k < 4; ++k) square[4 * q + k] = reinterpret_cast<Vector>(columns[k]);
  }
}
#endif

// Loads kLanes rows of kStep numbers, `stride` apart, transposed: each vector holds one lane of all rows.
template <typename Product>
SPECDEC_INLINE void load_transposed(const typename Product::Storage* const rows[kLanes],
                                    [[maybe_unused]] std::int64_t stride, Vector square[kLanes]) {
#if SPECDEC_LANES == 16
  // Rows at multiples of this distance share one set of the first-level cache, which evicts them from one quarter to the
  // next.
  constexpr std::int64_t kSetsBytes = 4096;
  constexpr bool kUnits = Product::kStep * sizeof(**rows) == sizeof(Vector);
  if (kUnits && stride * static_cast<std::int64_t>(sizeof(**rows)) % kSetsBytes != 0) {
    return load_by_quarters(reinterpret_cast<const float* const*>(rows), square);
  }
#endif
  for (int i = 0; i < kLanes; ++i) square[i] = Product::load(rows[i]);
  transpose(square);
}

// Format::store (dtype.h) of every lane, in the lower halves. It is written for vectors, because GCC unrolls a loop over
// lanes before it could vectorise it.
template <typename Format>
SPECDEC_INLINE Words stored(Words bits);

template <>
SPECDEC_INLINE Words stored<BFloat16>(Words bits) {
  const Words nan = reinterpret_cast<Words>((bits & 0x7fffffffu) > 0x7f800000u);
  return ((nan & (bits | 0x400000u)) | (~nan & (bits + 0x7fffu + ((bits >> 16) & 1u)))) >> 16;
}

template <>
SPECDEC_INLINE Words stored<Float16>(Words bits) {
  const Words m = bits & 0x7fffffffu;
  const Words nan = reinterpret_cast<Words>(m > 0x7f800000u);
  const Words large = reinterpret_cast<Words>(m >= 0x477ff000u);  // rounds to infinity, or is a NaN
  const Words small = reinterpret_cast<Words>(m < 0x38800000u);   // subnormal
  const Words rounded = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  const Words subnormal = reinterpret_cast<Words>(reinterpret_cast<Vector>(m) + 0.5f) - 0x3f000000u;
  const Words special = 0x7c00u | (nan & 0x200u);
  return ((bits >> 16) & 0x8000u) | (large & special) | (small & subnormal) | (~(large | small) & rounded);
}

template <typename Format>
SPECDEC_INLINE void store_lanes(Vector values, typename Format::Storage* out) {
#ifdef SPECDEC_DOT_BF16
  if constexpr (std::is_same_v<Format, BFloat16>) {  // one instruction, which treats subnormal numbers as zeros
    constexpr int kSubnormal = 0x20;
    if (_mm512_fpclass_ps_mask(reinterpret_cast<__m512>(values), kSubnormal) == 0) {
      const auto halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
      std::memcpy(out, &halves, sizeof(halves));
      return;
    }
  }
#endif
  if constexpr (std::is_same_v<typename Format::Storage, float>) {
    std::memcpy(out, &values, sizeof(values));
  } else {
    const Halves halves = __builtin_convertvector(stored<Format>(reinterpret_cast<Words>(values)), Halves);
    std::memcpy(out, &halves, sizeof(halves));
  }
}
