// The vector types of one instruction set, and their loads and stores. Every kernel includes this file in its own
// namespace, once per instruction set; SPECDEC_LANES is the number of floats in a vector.

constexpr int kLanes = SPECDEC_LANES;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));
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
