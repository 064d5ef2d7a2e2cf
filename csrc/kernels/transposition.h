// Transposes the words of kLanes vectors. Kernels include this file after vectors.h, in their own namespace, once per
// instruction set.

#if SPECDEC_LANES == 16
// Transposes four neighbouring rows within quarters: quarter q of columns[k] holds unit 4 q + k of the four rows.
SPECDEC_INLINE void transpose_quarters(const __m512 rows[4], __m512 columns[4]) {
  const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
  columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
  columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
  columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
}

// Transposes 16 rows of 16 units that are in registers.
SPECDEC_INLINE void transpose(Vector square[kLanes]) {
  __m512 rows[kLanes], columns[kLanes];
  std::memcpy(rows, square, sizeof(rows));
  for (int i = 0; i < kLanes; i += 4) transpose_quarters(rows + i, columns + i);
  for (int k = 0; k < 4; ++k) {
    const __m512 first01 = _mm512_shuffle_f32x4(columns[k], columns[4 + k], 0x44);
    const __m512 last01 = _mm512_shuffle_f32x4(columns[k], columns[4 + k], 0xee);
    const __m512 first23 = _mm512_shuffle_f32x4(columns[8 + k], columns[12 + k], 0x44);
    const __m512 last23 = _mm512_shuffle_f32x4(columns[8 + k], columns[12 + k], 0xee);
    square[k] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(first01, first23, 0x88));
    square[4 + k] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(first01, first23, 0xdd));
    square[8 + k] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(last01, last23, 0x88));
    square[12 + k] = reinterpret_cast<Vector>(_mm512_shuffle_f32x4(last01, last23, 0xdd));
  }
}
#else
typedef std::int32_t LaneIndex __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

// A step of a transposition: exchanges lanes of two vectors that are kHalf apart.
template <int kHalf>
SPECDEC_INLINE void exchange(Vector& a, Vector& b) {
  LaneIndex low, high;
  for (int j = 0; j < kLanes; ++j) {
    low[j] = (j & kHalf) == 0 ? j : kLanes + j - kHalf;
    high[j] = (j & kHalf) == 0 ? j + kHalf : kLanes + j;
  }
  const Vector first = shuffled(a, b, low);
  b = shuffled(a, b, high);
  a = first;
}

template <int kHalf = 1>
SPECDEC_INLINE void transpose(Vector square[kLanes]) {
  if constexpr (kHalf < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kHalf) == 0) exchange<kHalf>(square[i], square[i + kHalf]);
    }
    transpose<2 * kHalf>(square);
  }
}
#endif
