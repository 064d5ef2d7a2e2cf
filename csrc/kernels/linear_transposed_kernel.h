// The arithmetic of linear_transposed, included once per instruction set (attention_kernel.h explains why). SPECDEC_ISA
// names the namespace, SPECDEC_LANES the number of floats in its vectors. SPECDEC_DOT_BF16 is defined where one instruction
// adds the products of bf16 pairs.
//
// A unit is one input, widened to fp32, or a pair of inputs in bf16 where pairs are multiplied at once. A vector holds the
// weights of one unit for neighbouring outputs. An output adds its products unit by unit within a chunk of inputs, in
// order, and the sums of the chunks one after the other. So no bit depends on how rows and outputs are divided into blocks,
// on whether weights are packed, or on the thread.

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vectors.h"

constexpr int kRows = SPECDEC_LANES == 16 ? 6 : 2;  // rows of a block, of four vectors each: as many sums as registers hold
constexpr std::int64_t kChunk = 256;                // inputs whose weights for a block of outputs stay in a cache
constexpr std::int64_t kTogether = 384;             // rows that are multiplied with a chunk's weights before the next chunk
constexpr std::int64_t kAhead = 8;                  // units whose weights are fetched early: their cache lines lie far apart

SPECDEC_INLINE Vector widened(const float* from, Float32) { return load_as<Vector>(from); }
SPECDEC_INLINE Vector widened(const std::uint16_t* from, BFloat16) {
  return reinterpret_cast<Vector>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}
SPECDEC_INLINE Vector widened(const std::uint16_t* from, Float16) {  // as Float16::load
  const Words half = __builtin_convertvector(load_as<Halves>(from), Words), magnitude = half & 0x7fffu;
  const Vector scaled = reinterpret_cast<Vector>(magnitude << 13) * 0x1p112f;
  const Words special = reinterpret_cast<Words>(magnitude >= 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Vector>(reinterpret_cast<Words>(scaled) | special | ((half & 0x8000u) << 16));
}

// Units of one input.
template <typename Format>
struct Single {
  using Storage = typename Format::Storage;
  static constexpr std::int64_t kInputs = 1;
  // The weights of one unit for kVectors * kLanes outputs; those of the next input are `stride` numbers on.
  template <int kVectors>
  SPECDEC_INLINE static void load(const Storage* from, std::int64_t, Vector vectors[kVectors]) {
    for (int v = 0; v < kVectors; ++v) vectors[v] = widened(from + v * kLanes, Format{});
  }
  // Brings vectors from the order in which `load` returns them to the order of their outputs.
  template <int kVectors>
  SPECDEC_INLINE static void sort(Vector*) {}
  SPECDEC_INLINE static Vector broadcast(const float* unit) { return splat(*unit); }
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) { return multiply_add(input, weight, sum); }
};

#ifdef SPECDEC_DOT_BF16
// Units of two bf16, the first in the lower half.
struct Paired {
  using Storage = std::uint16_t;
  static constexpr std::int64_t kInputs = 2;
  // Interleaves two vectors within quarters, which takes the fewest instructions. `sort` undoes this for their sums.
  template <int kVectors>
  SPECDEC_INLINE static void load(const Storage* from, std::int64_t stride, Vector vectors[kVectors]) {
    if constexpr (kVectors == 1) {
      const Words first = __builtin_convertvector(load_as<Halves>(from), Words);
      const Words second = __builtin_convertvector(load_as<Halves>(from + stride), Words);
      vectors[0] = reinterpret_cast<Vector>(first | second << 16);
    } else {
      static_assert(kVectors % 2 == 0, "");
      for (int v = 0; v < kVectors; v += 2) {
        const __m512i first = _mm512_loadu_si512(from + v * kLanes), second = _mm512_loadu_si512(from + stride + v * kLanes);
        vectors[v] = reinterpret_cast<Vector>(_mm512_unpacklo_epi16(first, second));
        vectors[v + 1] = reinterpret_cast<Vector>(_mm512_unpackhi_epi16(first, second));
      }
    }
  }
  template <int kVectors>
  SPECDEC_INLINE static void sort(Vector* vectors) {
    const Words first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    for (int v = 0; v + 1 < kVectors; v += 2) {
      const Vector low = shuffled(vectors[v], vectors[v + 1], first);
      vectors[v + 1] = shuffled(vectors[v], vectors[v + 1], first + 8);
      vectors[v] = low;
    }
  }
  SPECDEC_INLINE static Vector broadcast(const float* unit) {
    return reinterpret_cast<Vector>(load_as<std::uint32_t>(unit) + Words{});
  }
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) {
    return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(input),
                                                     reinterpret_cast<__m512bh>(weight)));
  }
};
using UnitsBFloat16 = Paired;
#else
using UnitsBFloat16 = Single<BFloat16>;
#endif

template <typename Units>
constexpr std::int64_t num_units(std::int64_t in_features) {
  return (in_features + Units::kInputs - 1) / Units::kInputs;
}

// Writes all rows' units, row after row, with zeros after the last input.
template <typename Format, typename Units>
void prepare(const LinearArgs& args, float* units) {
  const auto* rows = static_cast<const typename Format::Storage*>(args.rows);
  const std::int64_t stride = num_units<Units>(args.in_features);
  for (std::int64_t row = 0; row < args.num_rows; ++row, rows += args.row_stride, units += stride) {
    if constexpr (Units::kInputs == 1) {
      widen_all(args.dtype, rows, units, args.in_features);
    } else {
      units[stride - 1] = 0.0f;
      std::memcpy(units, rows, static_cast<std::size_t>(args.in_features) * sizeof(*rows));
    }
  }
}

// The weights of one block of outputs, unit after unit, of kVectors vectors each.
template <typename Units>
struct Weights {
  const typename Units::Storage* from;  // the weights of the block's first output
  std::int64_t stride;                  // numbers between one input's weights and the next one's
  std::int64_t num_outputs;             // outputs of the block, which may end within a vector

  // Loads the weights of the unit that begins with input k and has `inputs` inputs; zeros where there is no output or
  // input.
  template <int kVectors>
  SPECDEC_INLINE void load(std::int64_t k, std::int64_t inputs, Vector vectors[kVectors]) const {
    constexpr std::int64_t kWidth = kVectors * kLanes;
    if (num_outputs == kWidth && inputs == Units::kInputs) return Units::template load<kVectors>(from + k * stride, stride, vectors);
    typename Units::Storage numbers[Units::kInputs][kWidth] = {};
    for (std::int64_t i = 0; i < inputs; ++i) {
      std::memcpy(numbers[i], from + (k + i) * stride, static_cast<std::size_t>(num_outputs) * sizeof(*from));
    }
    Units::template load<kVectors>(numbers[0], kWidth, vectors);
  }
};

// totals[r][v] += the sums of inputs [first, last) for kCount rows and kVectors vectors of outputs, whose weights are in
// `packed` unless that is null. Rows of units are `unit_stride` apart.
template <typename Units, int kCount, int kVectors>
SPECDEC_INLINE void add_chunk(const float* units, std::int64_t unit_stride, const Weights<Units>& weights,
                              const Vector* packed, std::int64_t first, std::int64_t last, float* totals) {
  Vector sums[kCount][kVectors] = {};
  for (std::int64_t k = first; k < last; k += Units::kInputs) {
    Vector own[kVectors];
    if (packed != nullptr) {
      for (int v = 0; v < kVectors; ++v) own[v] = packed[(k - first) / Units::kInputs * kVectors + v];
    } else {
      for (int i = 0; i < Units::kInputs * kVectors; ++i) {
        __builtin_prefetch(weights.from + (k + kAhead * Units::kInputs + i / kVectors) * weights.stride + i % kVectors * kLanes);
      }
      weights.template load<kVectors>(k, std::min(Units::kInputs, last - k), own);
    }
    for (int row = 0; row < kCount; ++row) {
      const Vector input = Units::broadcast(units + row * unit_stride + k / Units::kInputs);
      for (int v = 0; v < kVectors; ++v) sums[row][v] = Units::add(sums[row][v], input, own[v]);
    }
  }
  for (int row = 0; row < kCount; ++row) {
    Units::template sort<kVectors>(sums[row]);
    for (int v = 0; v < kVectors; ++v) {
      float* to = totals + (row * kVectors + v) * kLanes;
      store_as(to, load_as<Vector>(to) + sums[row][v]);
    }
  }
}

template <typename Units, int kVectors, int kCount>
SPECDEC_INLINE void add_rows(std::int64_t count, const float* units, std::int64_t unit_stride, const Weights<Units>& weights,
                             const Vector* packed, std::int64_t first, std::int64_t last, float* totals) {
  if constexpr (kCount > 0) {
    if (count != kCount) {
      return add_rows<Units, kVectors, kCount - 1>(count, units, unit_stride, weights, packed, first, last, totals);
    }
    add_chunk<Units, kCount, kVectors>(units, unit_stride, weights, packed, first, last, totals);
  }
}

// Computes outputs [begin, begin + num_outputs) of all rows, at most kVectors vectors. Weights that have to be widened or
// paired are packed first if several blocks of rows are multiplied with them.
template <typename Format, typename Units, int kVectors, int kMost = kRows>
void block(const LinearArgs& args, const float* units, std::int64_t begin, std::int64_t num_outputs) {
  using Storage = typename Format::Storage;
  constexpr std::int64_t kWidth = kVectors * kLanes;
  const Weights<Units> weights{static_cast<const Storage*>(args.weight) + begin, args.out_features, num_outputs};
  const Storage* bias = args.bias == nullptr ? nullptr : static_cast<const Storage*>(args.bias) + begin;
  Storage* out = static_cast<Storage*>(args.out) + begin;
  const std::int64_t unit_stride = num_units<Units>(args.in_features);
  float totals[kTogether * kWidth];
  Vector packed[kMost == 1 ? 1 : kChunk / Units::kInputs * kVectors];
  const bool packs = sizeof(Storage) < sizeof(float) && kMost > 1 && args.num_rows > kMost;
  for (std::int64_t top = 0; top < args.num_rows; top += kTogether) {
    const std::int64_t rows = std::min(kTogether, args.num_rows - top);
    std::fill(totals, totals + rows * kWidth, 0.0f);
    for (std::int64_t first = 0; first < args.in_features; first += kChunk) {
      const std::int64_t last = std::min(first + kChunk, args.in_features);
      for (std::int64_t k = first; packs && k < last; k += Units::kInputs) {
        weights.template load<kVectors>(k, std::min(Units::kInputs, last - k), packed + (k - first) / Units::kInputs * kVectors);
      }
      for (std::int64_t row = 0; row < rows; row += kMost) {
        add_rows<Units, kVectors, kMost>(std::min<std::int64_t>(kMost, rows - row), units + (top + row) * unit_stride, unit_stride,
                                         weights, packs ? packed : nullptr, first, last, totals + row * kWidth);
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t o = 0; o < num_outputs; ++o) {
        const float added = bias == nullptr ? 0.0f : Format::load(bias[o]);
        out[(top + row) * args.out_features + o] = Format::store(totals[row * kWidth + o] + added);
      }
    }
  }
}

// Computes outputs [begin, end) of all rows, whose units are prepared. Few rows leave registers for more outputs.
template <typename Format, typename Units>
void outputs(const LinearArgs& args, const float* units, std::int64_t begin, std::int64_t end) {
  constexpr int kWide = SPECDEC_LANES == 16 ? 16 : 8;
  if (args.num_rows == 1) {
    for (; begin + kWide * kLanes <= end; begin += kWide * kLanes) block<Format, Units, kWide, 1>(args, units, begin, kWide * kLanes);
  }
  for (; begin + 4 * kLanes <= end; begin += 4 * kLanes) block<Format, Units, 4>(args, units, begin, 4 * kLanes);
  for (; begin < end; begin += kLanes) block<Format, Units, 1>(args, units, begin, std::min<std::int64_t>(kLanes, end - begin));
}

template <typename Format, typename Units>
constexpr TransposedKernel::Format kernel_of() {
  return {num_units<Units>, prepare<Format, Units>, outputs<Format, Units>};
}

constexpr TransposedKernel kKernel = {
    {kernel_of<Float32, Single<Float32>>(), kernel_of<Float16, Single<Float16>>(), kernel_of<BFloat16, UnitsBFloat16>()},
    4 * kLanes};

}  // namespace SPECDEC_ISA
}  // namespace specdec
