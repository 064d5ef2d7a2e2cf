// The vectors of one instruction set, and their way from and to memory: every kernel includes this in its own namespace,
// once per instruction set, with SPECDEC_LANES, the floats of a vector.

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

// What load_as<Vector> does. With that template GCC 12 allocates the registers of linear's one-row kernels (AVX2, AVX-512)
// otherwise, and they take up to a half longer.
SPECDEC_INLINE Vector load_vector(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}
