// The vector types of one instruction set, their loads and stores, and the product that is added. Every kernel includes
// this file in its own namespace, once per instruction set, after intrinsics.h; SPECDEC_LANES is the number of floats in a
// vector.

constexpr int kLanes = SPECDEC_LANES;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));
typedef std::int32_t Integers __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * sizeof(std::uint16_t))));

template <typename Type>
SPECDEC_INLINE Type load_as(const void* from) {
  Type value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Type>
SPECDEC_INLINE void store_as(void* to, Type value) {
  std::memcpy(to, &value, sizeof(value));
}

// The same as load_as<Vector>. With that template, GCC 12 allocates the registers of linear's one-row kernels (AVX2,
// AVX-512) differently, and these kernels take up to a half longer.
SPECDEC_INLINE Vector load_vector(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// A vector of one number. A loop over lanes would take an instruction per lane. Subtracting 0 keeps -0; adding it would not.
SPECDEC_INLINE Vector splat(float number) { return number - Vector{}; }

// left * right + sum: rounded once where the instruction set has such an instruction, otherwise twice, and never as the
// compiler likes (setup.py). So a row has the same bits in every loop that multiplies it.
SPECDEC_INLINE Vector multiply_add(Vector left, Vector right, Vector sum) {
#if SPECDEC_LANES == 16
  return reinterpret_cast<Vector>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(left), reinterpret_cast<__m512>(right), reinterpret_cast<__m512>(sum)));
#elif SPECDEC_LANES == 8
  return reinterpret_cast<Vector>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(left), reinterpret_cast<__m256>(right), reinterpret_cast<__m256>(sum)));
#elif defined(__FMA__)
  return reinterpret_cast<Vector>(
      _mm_fmadd_ps(reinterpret_cast<__m128>(left), reinterpret_cast<__m128>(right), reinterpret_cast<__m128>(sum)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vector>(vfmaq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<float32x4_t>(left),
                                            reinterpret_cast<float32x4_t>(right)));
#else
  return sum + left * right;
#endif
}

// The lanes of two vectors that `index` names: those of `b` come after those of `a`.
template <typename Type, typename Index>
SPECDEC_INLINE Type shuffled(Type a, Type b, Index index) {
#ifdef __clang__  // which lacks GCC's function, and makes one instruction of this loop if the index is constant
  constexpr int kCount = sizeof(Index) / sizeof(index[0]);
  Type out;
  for (int i = 0; i < kCount; ++i) out[i] = index[i] < kCount ? a[index[i]] : b[index[i] - kCount];
  return out;
#else
  return __builtin_shuffle(a, b, index);
#endif
}
