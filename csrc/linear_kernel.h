// The arithmetic of linear, included once per instruction set (see attention_kernel.h for why): SPECDEC_ISA names the
// namespace, SPECDEC_LANES the floats of its vectors; SPECDEC_DOT_BF16 is defined where products of bf16 pairs are one
// instruction.
//
// An output is summed in kLanes lanes, lane l taking inputs l, l + kLanes, ... of a chunk in order, chunk after chunk, and
// the lanes are then added in pairs. So how rows and outputs are blocked, and by which thread, changes no bit.

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kLanes = SPECDEC_LANES;
constexpr int kRows = SPECDEC_LANES == 16 ? 6 : 2;  // rows and outputs of a block: as many sums as there are registers
constexpr int kOutputs = 4;
constexpr std::int64_t kChunk = 1024;               // inputs; chains of a sum longer than this lose too much to rounding
constexpr std::int64_t kBlockBytes = 1 << 18;       // of weights that all rows pass by before the next: half a cache

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

SPECDEC_INLINE Vector load_vector(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// Weights as they come, inputs widened to fp32 beforehand.
template <typename Format>
struct Widened {
  using Weight = typename Format::Storage;
  using Input = float;
  static constexpr int kStep = kLanes;  // inputs per instruction
  SPECDEC_INLINE static Input prepare(Weight x) { return Format::load(x); }
  SPECDEC_INLINE static Vector weights(const Weight* from) {
    Vector vector;
    for (int i = 0; i < kLanes; ++i) vector[i] = Format::load(from[i]);
    return vector;
  }
  SPECDEC_INLINE static Vector inputs(const Input* from) { return load_vector(from); }
  SPECDEC_INLINE static Vector add(Vector sum, Vector input, Vector weight) { return sum + input * weight; }
  // A loop over lanes would be as many instructions; less nothing is what keeps -0.
  SPECDEC_INLINE static Vector broadcast(const Input* from) { return *from - Vector{}; }
  SPECDEC_INLINE static Vector add_lanes(Vector sum, Vector input, Vector weight) { return add(sum, input, weight); }
};

#if SPECDEC_LANES == 16
template <>
SPECDEC_INLINE Vector Widened<BFloat16>::weights(const std::uint16_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <>
SPECDEC_INLINE Vector Widened<Float16>::weights(const std::uint16_t* from) {
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
#elif SPECDEC_LANES == 8
template <>
SPECDEC_INLINE Vector Widened<BFloat16>::weights(const std::uint16_t* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <>
SPECDEC_INLINE Vector Widened<Float16>::weights(const std::uint16_t* from) {
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#endif

#ifdef SPECDEC_DOT_BF16
// Pairs of bf16 products added to each lane by one instruction.
struct Paired {
  using Weight = std::uint16_t;
  using Input = std::uint16_t;
  static constexpr int kStep = 2 * kLanes;
  SPECDEC_INLINE static Input prepare(Weight x) { return x; }
  SPECDEC_INLINE static __m512i weights(const Weight* from) { return _mm512_loadu_si512(from); }
  SPECDEC_INLINE static __m512i inputs(const Input* from) { return _mm512_loadu_si512(from); }
  SPECDEC_INLINE static Vector add(Vector sum, __m512i input, __m512i weight) {
    return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(input),
                                                     reinterpret_cast<__m512bh>(weight)));
  }
  SPECDEC_INLINE static __m512i broadcast(const Input* from) {
    std::int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  SPECDEC_INLINE static Vector add_lanes(Vector sum, __m512i input, Vector weight) {
    return add(sum, input, reinterpret_cast<__m512i>(weight));
  }
};
#endif

typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef std::int32_t QuadIndex __attribute__((vector_size(4 * sizeof(std::int32_t))));

// Adds the upper half of the lanes to the lower, until four are left.
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
  const Quad ab = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
  const Quad cd = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
  return __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high);
}

// sums[r][o] += inputs [first, last) of row r times those of output o; both are whole steps.
template <int kR, int kO, typename Product>
SPECDEC_INLINE void add_chunk(const typename Product::Input* inputs, std::int64_t input_stride,
                              const typename Product::Weight* weights, std::int64_t weight_stride, std::int64_t first,
                              std::int64_t last, bool fetches, Vector sums[kR][kO]) {
  Vector chunk[kR][kO] = {};
  for (std::int64_t k = first; k < last; k += Product::kStep) {
    decltype(Product::weights(weights)) operands[kO];
    for (int o = 0; o < kO; ++o) {
      operands[o] = Product::weights(weights + o * weight_stride + k);
      // The next block's weights: hardware follows a stream to the end of its page, and a block has several.
      if (fetches) __builtin_prefetch(weights + (kO + o) * weight_stride + k);
    }
    for (int r = 0; r < kR; ++r) {
      const auto input = Product::inputs(inputs + r * input_stride + k);
      for (int o = 0; o < kO; ++o) chunk[r][o] = Product::add(chunk[r][o], input, operands[o]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int o = 0; o < kO; ++o) sums[r][o] += chunk[r][o];
  }
}

template <int kR, int kO, typename Format, typename Product>
SPECDEC_INLINE void block(const LinearArgs& args, const typename Product::Input* inputs, std::int64_t padded,
                          std::int64_t row, std::int64_t output) {
  using Weight = typename Product::Weight;
  const Weight* weights = static_cast<const Weight*>(args.weight) + output * args.in_features;
  const std::int64_t whole = args.in_features - args.in_features % Product::kStep;
  Vector sums[kR][kO] = {};
  for (std::int64_t first = 0; first < whole; first += kChunk) {
    add_chunk<kR, kO, Product>(inputs + row * padded, padded, weights, args.in_features, first,
                               std::min(whole, first + kChunk), row == 0, sums);
  }
  if (whole < args.in_features) {  // the last step's weights end in zeros, as its inputs do
    Weight last[kO][Product::kStep] = {};
    for (int o = 0; o < kO; ++o) {
      std::memcpy(last[o], weights + o * args.in_features + whole,
                  static_cast<std::size_t>(args.in_features - whole) * sizeof(Weight));
    }
    add_chunk<kR, kO, Product>(inputs + row * padded + whole, padded, last[0], Product::kStep, 0, Product::kStep, false,
                               sums);
  }
  const Weight* bias = static_cast<const Weight*>(args.bias);
  for (int r = 0; r < kR; ++r) {
    Weight* out = static_cast<Weight*>(args.out) + (row + r) * args.out_features + output;
    Quad folded[kOutputs] = {};
    for (int o = 0; o < kO; ++o) folded[o] = fold(sums[r][o]);
    Quad total = sums_of(folded[0], folded[1], folded[2], folded[3]);
    if (bias != nullptr) {
      for (int o = 0; o < kO; ++o) total[o] += Format::load(bias[output + o]);
    }
    for (int o = 0; o < kO; ++o) out[o] = Format::store(total[o]);
  }
}

template <int kO, typename Format, typename Product>
SPECDEC_INLINE void all_rows(const LinearArgs& args, const typename Product::Input* inputs, std::int64_t padded,
                             std::int64_t row, std::int64_t count, std::int64_t output) {
  switch (count) {
    case 1: return block<1, kO, Format, Product>(args, inputs, padded, row, output);
    case 2: return block<2, kO, Format, Product>(args, inputs, padded, row, output);
#if SPECDEC_LANES == 16
    case 3: return block<3, kO, Format, Product>(args, inputs, padded, row, output);
    case 4: return block<4, kO, Format, Product>(args, inputs, padded, row, output);
    case 5: return block<5, kO, Format, Product>(args, inputs, padded, row, output);
    case 6: return block<6, kO, Format, Product>(args, inputs, padded, row, output);
#endif
  }
}

// Rows of a block: of equal height, because a last one of a row or two has too few sums to keep the multipliers busy.
SPECDEC_INLINE std::int64_t block_rows(std::int64_t num_rows) {
  const std::int64_t blocks = (num_rows + kRows - 1) / kRows;
  return (num_rows + blocks - 1) / std::max<std::int64_t>(1, blocks);
}

#include "linear_lanes.h"

// Outputs [begin, end) of all rows. `inputs` are [num_rows, padded], zeros after in_features; `buffer` has lane_bytes.
template <typename Format, typename Product>
void outputs(const LinearArgs& args, const void* prepared, std::int64_t padded, std::int64_t begin, std::int64_t end,
             void* buffer) {
  const auto* inputs = static_cast<const typename Product::Input*>(prepared);
  if (lane_bytes<Product>(args, padded) > 0) begin = lane_outputs<Format, Product>(args, prepared, padded, begin, end, buffer);
  const std::int64_t row_bytes = args.in_features * static_cast<std::int64_t>(sizeof(typename Product::Weight));
  const std::int64_t step = std::max<std::int64_t>(kOutputs, kBlockBytes / row_bytes / kOutputs * kOutputs);
  const std::int64_t rows = block_rows(args.num_rows);
  for (std::int64_t first = begin; first < end; first += step) {
    const std::int64_t last = std::min(end, first + step);
    for (std::int64_t row = 0; row < args.num_rows; row += rows) {
      const std::int64_t count = std::min(rows, args.num_rows - row);
      std::int64_t output = first;
      for (; output + kOutputs <= last; output += kOutputs) {
        all_rows<kOutputs, Format, Product>(args, inputs, padded, row, count, output);
      }
      for (; output < last; ++output) all_rows<1, Format, Product>(args, inputs, padded, row, count, output);
    }
  }
}

template <typename Product>
void prepare(const LinearArgs& args, void* prepared, std::int64_t padded) {
  auto* inputs = static_cast<typename Product::Input*>(prepared);
  const auto* rows = static_cast<const typename Product::Weight*>(args.rows);
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    for (std::int64_t k = 0; k < args.in_features; ++k) {
      inputs[row * padded + k] = Product::prepare(rows[row * args.row_stride + k]);
    }
    std::memset(inputs + row * padded + args.in_features, 0,
                static_cast<std::size_t>(padded - args.in_features) * sizeof(typename Product::Input));
  }
}

#ifdef SPECDEC_DOT_BF16
using ProductBFloat16 = Paired;
#else
using ProductBFloat16 = Widened<BFloat16>;
#endif

const std::array<LinearKernel, 3> kKernels = {
    LinearKernel{prepare<Widened<Float32>>, outputs<Float32, Widened<Float32>>, lane_bytes<Widened<Float32>>,
                 Widened<Float32>::kStep, 4},
    LinearKernel{prepare<Widened<Float16>>, outputs<Float16, Widened<Float16>>, lane_bytes<Widened<Float16>>,
                 Widened<Float16>::kStep, 4},
    LinearKernel{prepare<ProductBFloat16>, outputs<BFloat16, ProductBFloat16>, lane_bytes<ProductBFloat16>,
                 ProductBFloat16::kStep, sizeof(ProductBFloat16::Input)}};

}  // namespace SPECDEC_ISA
}  // namespace specdec

#undef SPECDEC_ISA
#undef SPECDEC_LANES
