// The arithmetic of linear_transposed, included once per instruction set (see attention_kernel.h for why): SPECDEC_ISA
// names the namespace, SPECDEC_LANES the floats of its vectors.
//
// A vector holds neighbouring outputs. An output's products are added one by one within a chunk of inputs, in order, and
// the chunks' sums one after the other. So how rows and outputs are blocked, and by which thread, changes no bit.

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kLanes = SPECDEC_LANES;
constexpr int kRows = SPECDEC_LANES == 16 ? 6 : 2;  // of a block, with four vectors each: as many sums as registers hold
constexpr std::int64_t kChunk = 256;                // inputs: their weights for a block of outputs stay in a cache
constexpr std::int64_t kTogether = 96;              // rows that pass by a chunk's weights before the next chunk
constexpr std::int64_t kAhead = 8;                  // inputs whose weights are asked for early: lines lie far apart

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint32_t Bits __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * sizeof(std::uint16_t))));

template <typename Type>
SPECDEC_INLINE Type load_as(const void* from) {
  Type vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

SPECDEC_INLINE Vector widened(const float* from, Float32) { return load_as<Vector>(from); }
SPECDEC_INLINE Vector widened(const std::uint16_t* from, BFloat16) {
  return reinterpret_cast<Vector>(__builtin_convertvector(load_as<Halves>(from), Bits) << 16);
}
SPECDEC_INLINE Vector widened(const std::uint16_t* from, Float16) {  // as Float16::load
  const Bits half = __builtin_convertvector(load_as<Halves>(from), Bits), magnitude = half & 0x7fffu;
  const Vector scaled = reinterpret_cast<Vector>(magnitude << 13) * 0x1p112f;
  const Bits special = reinterpret_cast<Bits>(magnitude >= 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(scaled) | special | ((half & 0x8000u) << 16));
}

// `count` numbers, fewer than a vector holds, and zeros.
template <typename Format>
SPECDEC_INLINE Vector some(const typename Format::Storage* from, std::int64_t count) {
  typename Format::Storage numbers[kLanes] = {};
  std::memcpy(numbers, from, static_cast<std::size_t>(count) * sizeof(*from));
  return widened(numbers, Format{});
}

// totals[r][v] += the sums of inputs [first, last) for kCount rows and kVectors vectors of outputs, of which `partial`
// outputs are there if it is not 0. Rows of totals are `width` apart.
template <typename Format, int kCount, int kVectors>
SPECDEC_INLINE void add_chunk(const float* inputs, std::int64_t in_features, const typename Format::Storage* weight,
                              std::int64_t out_features, std::int64_t first, std::int64_t last, std::int64_t partial,
                              float* totals, std::int64_t width) {
  Vector sums[kCount][kVectors] = {};
  for (std::int64_t k = first; k < last; ++k) {
    const typename Format::Storage* from = weight + k * out_features;
    Vector weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(from + kAhead * out_features + v * kLanes);
      weights[v] = partial == 0 ? widened(from + v * kLanes, Format{}) : some<Format>(from, partial);
    }
    for (int row = 0; row < kCount; ++row) {
      const Vector input = inputs[row * in_features + k] - Vector{};
      for (int v = 0; v < kVectors; ++v) sums[row][v] = sums[row][v] + input * weights[v];
    }
  }
  for (int row = 0; row < kCount; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = totals + row * width + v * kLanes;
      const Vector total = load_as<Vector>(to) + sums[row][v];
      std::memcpy(to, &total, sizeof(total));
    }
  }
}

template <typename Format, int kVectors, int kCount = kRows>
SPECDEC_INLINE void add_rows(std::int64_t count, const float* inputs, const LinearArgs& args,
                             const typename Format::Storage* weight, std::int64_t first, std::int64_t last,
                             std::int64_t partial, float* totals) {
  if constexpr (kCount > 0) {
    if (count != kCount) return add_rows<Format, kVectors, kCount - 1>(count, inputs, args, weight, first, last, partial, totals);
    add_chunk<Format, kCount, kVectors>(inputs, args.in_features, weight, args.out_features, first, last, partial, totals,
                                        kVectors * kLanes);
  }
}

// Outputs [begin, begin + kVectors * kLanes), or `partial` of them, of all rows.
template <typename Format, int kVectors, int kMost = kRows>
void block(const LinearArgs& args, const float* inputs, std::int64_t begin, std::int64_t partial) {
  using Storage = typename Format::Storage;
  constexpr std::int64_t kWidth = kVectors * kLanes;
  const Storage* weight = static_cast<const Storage*>(args.weight) + begin;
  const Storage* bias = args.bias == nullptr ? nullptr : static_cast<const Storage*>(args.bias) + begin;
  Storage* out = static_cast<Storage*>(args.out) + begin;
  const std::int64_t outputs = partial == 0 ? kWidth : partial;
  float totals[kTogether * kWidth];
  for (std::int64_t top = 0; top < args.num_rows; top += kTogether) {
    const std::int64_t rows = std::min(kTogether, args.num_rows - top);
    std::fill(totals, totals + rows * kWidth, 0.0f);
    for (std::int64_t first = 0; first < args.in_features; first += kChunk) {
      const std::int64_t last = std::min(first + kChunk, args.in_features);
      for (std::int64_t row = 0; row < rows; row += kMost) {
        add_rows<Format, kVectors, kMost>(std::min<std::int64_t>(kMost, rows - row), inputs + (top + row) * args.in_features,
                                          args, weight, first, last, partial, totals + row * kWidth);
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t o = 0; o < outputs; ++o) {
        const float added = bias == nullptr ? 0.0f : Format::load(bias[o]);
        out[(top + row) * args.out_features + o] = Format::store(totals[row * kWidth + o] + added);
      }
    }
  }
}

// Outputs [begin, end) of all rows, whose inputs have been widened to fp32. Few rows leave registers for more outputs.
template <typename Format>
void outputs(const LinearArgs& args, const float* inputs, std::int64_t begin, std::int64_t end) {
  constexpr int kWide = SPECDEC_LANES == 16 ? 16 : 8;
  if (args.num_rows == 1) {
    for (; begin + kWide * kLanes <= end; begin += kWide * kLanes) block<Format, kWide, 1>(args, inputs, begin, 0);
  }
  for (; begin + 4 * kLanes <= end; begin += 4 * kLanes) block<Format, 4>(args, inputs, begin, 0);
  for (; begin + kLanes <= end; begin += kLanes) block<Format, 1>(args, inputs, begin, 0);
  if (begin < end) block<Format, 1>(args, inputs, begin, end - begin);
}

constexpr TransposedKernel kKernel = {{outputs<Float32>, outputs<Float16>, outputs<BFloat16>}, 4 * kLanes};

}  // namespace SPECDEC_ISA
}  // namespace specdec

#undef SPECDEC_ISA
#undef SPECDEC_LANES
