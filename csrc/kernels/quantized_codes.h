// From codes to values: quantized_kernel.h includes this file, once per instruction set.
//
// A decoder makes the values of one code of every word in a vector: code n of a word belongs to input input_of(n) of the
// word's inputs.

// The code of a word that belongs to an input: the inverse of Codes::input_of.
template <typename Codes>
constexpr int code_of(int input) {
  for (int n = 0; n < Codes::kCodes; ++n) {
    if (Codes::input_of(n) == input) return n;
  }
  return -1;
}

SPECDEC_INLINE Vector as_vector(Words bits) { return reinterpret_cast<Vector>(bits); }

struct Int8Codes {
  static constexpr int kCodes = 4;
  static constexpr int input_of(int n) { return n; }
  explicit Int8Codes(const PackedWeight&) {}
  template <int kN>
  SPECDEC_INLINE Vector values(Words words) const {
    return __builtin_convertvector(reinterpret_cast<Integers>(words << (24 - 8 * kN)) >> 24, Vector);
  }
};

// OCP e4m3: four bits of exponent with bias 7. The exponent moves to that of fp32; without it, the mantissa is what exceeds
// the smallest normal number of its place, so no subnormal fp32 number occurs, which a thread may flush to zero.
struct Float8Codes {
  static constexpr int kCodes = 4;
  static constexpr int input_of(int n) { return n; }
  explicit Float8Codes(const PackedWeight&) {}
  template <int kN>
  SPECDEC_INLINE Vector values(Words words) const {
    const Words top = words << (24 - 8 * kN);
    const Words magnitude = (top & 0x7f000000u) >> 4;
    const Words normal = magnitude + (120u << 23);
    const Words subnormal = reinterpret_cast<Words>(as_vector(magnitude + (121u << 23)) - 0x1p-6f);
    const Words is_small = reinterpret_cast<Words>(magnitude < (1u << 23));
    return as_vector((is_small & subnormal) | (~is_small & normal) | (top & 0x80000000u));
  }
};

struct TableCodes {
  static constexpr int kCodes = 8;
  static constexpr int input_of(int n) { return n % 2 * 4 + n / 2; }  // the low halves of four bytes, then the high ones
  explicit TableCodes(const PackedWeight& weight) { std::memcpy(table, weight.table, sizeof(table)); }
  template <int kN>
  SPECDEC_INLINE Vector values(Words words) const {
#if SPECDEC_LANES == 16
    return reinterpret_cast<Vector>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> (4 * kN)), _mm512_loadu_ps(table)));
#elif SPECDEC_LANES == 8
    const __m256i index = reinterpret_cast<__m256i>(words >> (4 * kN));  // the instructions read three bits of it
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return reinterpret_cast<Vector>(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))));
#else
    Vector values;
    for (int i = 0; i < kLanes; ++i) values[i] = table[(words[i] >> (4 * kN)) & 15u];
    return values;
#endif
  }
  float table[16];
};
