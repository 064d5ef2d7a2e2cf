// The arithmetic of linear_transposed, included once per instruction set (see attention_kernel.h for why): SPECDEC_ISA
// names the namespace, SPECDEC_LANES the floats of its vectors; SPECDEC_DOT_BF16 is defined where products of bf16 pairs are
// one instruction.
//
// A unit is an input, widened to fp32, or a pair of them in bf16 where pairs are multiplied at once. A vector holds the
// weights of one unit for neighbouring outputs. An output's products are added unit by unit within a chunk of inputs, in
// order, and the chunks' sums one after the other. So how rows and outputs are blocked, whether weights are packed, and
// which thread computes what changes no bit.

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vectors.h"

constexpr int kRows = SPECDEC_LANES == 16 ? 6 : 2;  // of a block, with four vectors each: as many sums as registers hold
constexpr std::int64_t kChunk = 256;                // inputs: their weights for a block of outputs stay in a cache
constexpr std::int64_t kTogether = 384;             // rows that pass by a chunk's weights before the next chunk
constexpr std::int64_t kAhead = 8;                  // units whose weights are asked for early: lines lie far apart

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
  // The weights of one unit for kVectors * kLanes outputs; `stride` lies between inputs.
  template <int kVectors>
  SPECDEC_INLINE static void load(const Storage* from, std::int64_t, Vector vectors[kVectors]) {
    for (int v = 0; v < kVectors; ++v) vectors[v] = widened(from + v * kLanes, Format{});
  }
  // Vectors in the order that load gives them, in that of their outputs.
  template <int kVectors>
  SPECDEC_INLINE static void sort(Vector*) {}
  SPECDEC_INLINE static Vector broadcast(const float* unit) { return *unit - Vector{}; }  // less nothing is what keeps -0
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) { return sum + input * weight; }
};

#ifdef SPECDEC_DOT_BF16
// Units of two bf16, the first in the lower half.
struct Paired {
  using Storage = std::uint16_t;
  static constexpr std::int64_t kInputs = 2;
  // Two vectors are interleaved within quarters, which takes the fewest instructions; `sort` undoes it for their sums.
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
      const Vector low = __builtin_shuffle(vectors[v], vectors[v + 1], first);
      vectors[v + 1] = __builtin_shuffle(vectors[v], vectors[v + 1], first + 8);
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

// All rows' units, row after row; zeros after the last input.
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

// Weights of one block of outputs for inputs [first, last): unit after unit, kVectors vectors each.
template <typename Units>
struct Weights {
  const typename Units::Storage* from;  // of the block's first output
  std::int64_t stride;                  // from one input's to the next's
  std::int64_t num_outputs;             // the block's, which may end within a vector

  // Of the unit that begins with input k, of which `inputs` are there; zeros where there is no output or input.
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

// Outputs [begin, begin + num_outputs) of all rows, of at most kVectors vectors. Weights that several blocks of rows pass by
// and that have to be widened or paired are packed first.
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

// Outputs [begin, end) of all rows, whose units are prepared. Few rows leave registers for more outputs.
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
