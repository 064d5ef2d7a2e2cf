// The sums over the lanes of vectors, for linear_rows.h. linear_kernel.h includes this file, once per instruction set.

typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef std::int32_t QuadIndex __attribute__((vector_size(4 * sizeof(std::int32_t))));

// Adds the upper half of the lanes to the lower half, until four lanes are left.
SPECDEC_INLINE Quad fold(Vector lanes) {
#if SPECDEC_LANES == 16
  typedef float Eight __attribute__((vector_size(8 * sizeof(float))));
  Eight eights[2];
  std::memcpy(eights, &lanes, sizeof(lanes));
  const Eight half = eights[0] + eights[1];
#else
  const Vector half = lanes;
#endif
#if SPECDEC_LANES >= 8
  Quad quads[2];
  std::memcpy(quads, &half, sizeof(half));
  return quads[0] + quads[1];
#else
  return half;
#endif
}

// The sums over the lanes of four vectors, side by side.
SPECDEC_INLINE Quad sums_of(Quad a, Quad b, Quad c, Quad d) {
  const QuadIndex even = {0, 4, 2, 6}, odd = {1, 5, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
  const Quad ab = shuffled(a, b, even) + shuffled(a, b, odd);
  const Quad cd = shuffled(c, d, even) + shuffled(c, d, odd);
  return shuffled(ab, cd, low) + shuffled(ab, cd, high);
}

#if SPECDEC_LANES == 16
// The sums over the lanes of kO outputs of kRows rows: quarter r has those of row r. The additions are those of fold and
// sums_of, but an instruction serves several sums.
template <int kRows, int kO>
SPECDEC_INLINE Vector sums_of_rows(const Vector (*sums)[kO]) {
  using Even = std::integral_constant<int, 0x88>;
  using Odd = std::integral_constant<int, 0xdd>;
  using Low = std::integral_constant<int, 0x44>;
  using High = std::integral_constant<int, 0xee>;
  // The intrinsics take a constant, which a parameter is only after optimisation, and a type always has.
  const auto quarters = [](Vector a, Vector b, auto which) {
    constexpr int kWhich = decltype(which)::value;
    return reinterpret_cast<Vector>(_mm512_shuffle_f32x4(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), kWhich));
  };
  const auto numbers = [](Vector a, Vector b, auto which) {
    constexpr int kWhich = decltype(which)::value;
    return reinterpret_cast<Vector>(_mm512_shuffle_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), kWhich));
  };
  constexpr int kLast = kRows - 1;
  Vector four[4] = {};
  for (int o = 0; o < kO; ++o) {
    const Vector first = quarters(sums[0][o], sums[1][o], Low()) + quarters(sums[0][o], sums[1][o], High());
    const Vector last = quarters(sums[2][o], sums[kLast][o], Low()) + quarters(sums[2][o], sums[kLast][o], High());
    four[o] = quarters(first, last, Even()) + quarters(first, last, Odd());
  }
  const Vector ab = numbers(four[0], four[1], Even()) + numbers(four[0], four[1], Odd());
  const Vector cd = numbers(four[2], four[3], Even()) + numbers(four[2], four[3], Odd());
  return numbers(ab, cd, Even()) + numbers(ab, cd, Odd());
}
#endif

// Adds the lanes, and writes kO totals of each row from kRow on. After three totals it writes an arbitrary number.
template <int kR, int kO, int kRow = 0>
SPECDEC_INLINE void store_totals(const Vector (*sums)[kO], float* totals) {
  constexpr int kRows = std::min(4, kR - kRow);
  Quad quads[kRows];
#if SPECDEC_LANES == 16
  if constexpr (kRows > 2 && kO > 1) {
    const Vector rows = sums_of_rows<kRows, kO>(sums + kRow);
    std::memcpy(quads, &rows, sizeof(quads));
  } else
#endif
  {
    for (int r = 0; r < kRows; ++r) {
      Quad folded[4] = {};
      for (int o = 0; o < kO; ++o) folded[o] = fold(sums[kRow + r][o]);
      quads[r] = sums_of(folded[0], folded[1], folded[2], folded[3]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(totals + (kRow + r) * kPanel, &quads[r], kO == 1 ? sizeof(float) : sizeof(Quad));
  }
  if constexpr (kRow + kRows < kR) store_totals<kR, kO, kRow + kRows>(sums, totals);
}
