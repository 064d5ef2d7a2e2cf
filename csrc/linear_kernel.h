// The arithmetic of linear, included once per instruction set (see attention_kernel.h for why): SPECDEC_ISA names the
// namespace, SPECDEC_LANES the floats of its vectors; SPECDEC_DOT_BF16 is defined where products of bf16 pairs are one
// instruction, and SPECDEC_TILES, a class of amx_tiles.h, where the kernel on tiles is wanted.
//
// An output is summed in kLanes lanes, lane l taking units l, l + kLanes, ... of a chunk in order, chunk after chunk, and
// the lanes are then added in pairs. So how rows and outputs are blocked, and by which thread, changes no bit. Few rows pass
// by the weights where these are, with lanes along the inputs; many pass by panels of transposed weights (linear_panels.h).

namespace specdec {
namespace SPECDEC_ISA {

#include "linear_vectors.h"

constexpr int kRows = SPECDEC_LANES == 16 ? 6 : 2;  // rows and outputs of a block: as many sums as there are registers
constexpr int kOutputs = 4;
constexpr std::int64_t kChunkSteps = SPECDEC_LANES == 16 ? 64 : 1024 / SPECDEC_LANES;  // longer sums lose too much to rounding
constexpr std::int64_t kWeightRows = 6;             // in whose time weights are transposed, about
constexpr std::int64_t kBlockBytes = 1 << 18;       // of weights that all rows pass by before the next: half a cache

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

// sums[r][o] += steps [first, last) of row r times those of output o; the last step's weights are at `tail`, if that is
// not null, a step for each output.
template <int kR, int kO, typename Product>
SPECDEC_INLINE void add_chunk(const float* inputs, std::int64_t input_stride, const typename Product::Storage* weights,
                              std::int64_t weight_stride, const typename Product::Storage* tail, std::int64_t first,
                              std::int64_t last, bool fetches, Vector sums[kR][kO]) {
  const auto add_step = [&](const typename Product::Storage* from, std::int64_t stride, std::int64_t step) {
    Vector operands[kO];
    for (int o = 0; o < kO; ++o) operands[o] = Product::load(from + o * stride);
    for (int r = 0; r < kR; ++r) {
      const Vector input = load_vector(inputs + r * input_stride + step * kLanes);
      for (int o = 0; o < kO; ++o) sums[r][o] = Product::Units::add(sums[r][o], input, operands[o]);
    }
  };
  const std::int64_t whole = tail == nullptr ? last : last - 1;
  for (std::int64_t step = first; step < whole; ++step) {
    const auto* from = weights + step * Product::kStep;
    // The next block's weights: hardware follows a stream to the end of its page, and a block has several.
    for (int o = 0; fetches && o < kO; ++o) __builtin_prefetch(from + (kO + o) * weight_stride);
    add_step(from, weight_stride, step);
  }
  if (tail != nullptr) add_step(tail, Product::kStep, whole);
}

// Rows [row, row + kR) of the prepared ones, outputs [output, output + kO).
template <int kR, int kO, typename Format, typename Product>
SPECDEC_INLINE void block(const LinearWork& work, std::int64_t row, std::int64_t output) {
  using Storage = typename Format::Storage;
  const LinearArgs& args = work.args;
  const Storage* weights = static_cast<const Storage*>(args.weight) + output * args.in_features;
  const std::int64_t num_steps = work.plan.num_steps, stride = num_steps * kLanes;
  const float* inputs = reinterpret_cast<const float*>(work.inputs) + row * stride;
  const std::int64_t left = args.in_features % Product::kStep;
  Storage tail[kO][Product::kStep] = {};  // ends in zeros, as the inputs do
  for (int o = 0; o < kO && left > 0; ++o) {
    std::memcpy(tail[o], weights + (o + 1) * args.in_features - left, static_cast<std::size_t>(left) * sizeof(Storage));
  }
  Vector sums[kR][kO] = {};
  for (std::int64_t first = 0; first < num_steps; first += kChunkSteps) {
    const std::int64_t last = std::min(num_steps, first + kChunkSteps);
    Vector chunk[kR][kO] = {};
    add_chunk<kR, kO, Product>(inputs, stride, weights, args.in_features, last == num_steps && left > 0 ? tail[0] : nullptr,
                               first, last, row == 0, chunk);
    for (int r = 0; r < kR; ++r) {
      for (int o = 0; o < kO; ++o) sums[r][o] = first == 0 ? chunk[r][o] : sums[r][o] + chunk[r][o];
    }
  }
  const Storage* bias = static_cast<const Storage*>(args.bias);
  for (int r = 0; r < kR; ++r) {
    Storage* out = static_cast<Storage*>(args.out) + (work.first_row + row + r) * args.out_features + output;
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
SPECDEC_INLINE void block_of(const LinearWork& work, std::int64_t row, std::int64_t count, std::int64_t output) {
  switch (count) {
    case 1: return block<1, kO, Format, Product>(work, row, output);
    case 2: return block<2, kO, Format, Product>(work, row, output);
#if SPECDEC_LANES == 16
    case 3: return block<3, kO, Format, Product>(work, row, output);
    case 4: return block<4, kO, Format, Product>(work, row, output);
    case 5: return block<5, kO, Format, Product>(work, row, output);
    case 6: return block<6, kO, Format, Product>(work, row, output);
#endif
  }
}

// Inputs of a block of rows as vectors, row after row.
template <typename Product>
void prepare_rows(const LinearWork& work, std::int64_t index) {
  const LinearArgs& args = work.args;
  const auto* rows = static_cast<const typename Product::Storage*>(args.rows);
  const std::int64_t num_whole = args.in_features / Product::kStep;
  auto* inputs = reinterpret_cast<float*>(work.prepared(index));
  for (std::int64_t row = 0; row < work.rows_of(index); ++row, inputs += work.plan.num_steps * kLanes) {
    const auto* from = rows + (work.row_of(index) + row) * args.row_stride;
    for (std::int64_t step = 0; step < work.plan.num_steps; ++step) {
      const std::int64_t first = step * Product::kStep;
      const Vector units = step < num_whole ? Product::load(from + first)
                                            : load_some<Product>(from + first, args.in_features - first);
      std::memcpy(inputs + step * kLanes, &units, sizeof(units));
    }
  }
}

template <typename Format, typename Product>
void row_outputs(const LinearWork& work, Span blocks, Span outputs, void*) {
  const std::int64_t row_bytes = work.args.in_features * static_cast<std::int64_t>(sizeof(typename Format::Storage));
  const std::int64_t step = std::max<std::int64_t>(kOutputs, kBlockBytes / row_bytes / kOutputs * kOutputs);
  for (std::int64_t first = outputs.begin; first < outputs.end; first += step) {
    const std::int64_t last = std::min(outputs.end, first + step);
    for (std::int64_t index = blocks.begin; index < blocks.end; ++index) {
      const std::int64_t row = index * work.plan.height, count = work.rows_of(index);
      std::int64_t output = first;
      for (; output + kOutputs <= last; output += kOutputs) block_of<kOutputs, Format, Product>(work, row, count, output);
      for (; output < last; ++output) block_of<1, Format, Product>(work, row, count, output);
    }
  }
}

#include "linear_panels.h"

// From how many rows on panels are worth transposing weights: a pair of blocks saves more where inputs are few, and numbers
// that are widened take twice as many steps to transpose.
template <typename Format, typename Product>
std::int64_t least_panel_rows(std::int64_t in_features) {
  constexpr bool kWidens = Product::kStep * sizeof(typename Format::Storage) < sizeof(Vector), kPairs = Product::kStep > kLanes;
  constexpr std::int64_t kLeast = kPairs ? 4 : 12, kMost = kWidens ? 48 : kPairs ? 32 : 24;
  return std::max(kLeast, std::min(kMost, in_features / 32));
}

template <typename Format, typename Product>
LinearPlan plan(const LinearArgs& args) {
  constexpr std::int64_t kVectorBytes = sizeof(Vector);
  const std::int64_t num_steps = (args.in_features + Product::kStep - 1) / Product::kStep;
  if (args.num_rows < least_panel_rows<Format, Product>(args.in_features)) {
    const std::int64_t height = even_height(args.num_rows, kRows), block_bytes = height * num_steps * kVectorBytes;
    return {prepare_rows<Product>, row_outputs<Format, Product>, num_steps, height, block_bytes,
            most_blocks(block_bytes), kOutputs, 0, kWeightRows};
  }
  const std::int64_t height = even_height(args.num_rows, kTileRows / lanes_at_once(num_steps));
  const std::int64_t block_bytes = kLanes * block_stride(num_steps, height) * static_cast<std::int64_t>(sizeof(float));
  return {prepare_panels<Product>, panel_outputs<Format, Product>, num_steps, height, block_bytes,
          most_blocks(block_bytes), kPanel, kLanes * panel_stride(num_steps) * kVectorBytes, kWeightRows};
}

const LinearPlans kPlans = {plan<Float32, Widened<Float32>>, plan<Float16, Widened<Float16>>, plan<BFloat16, ProductBFloat16>};

#ifdef SPECDEC_TILES
#include "linear_tiles.h"
#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec

#undef SPECDEC_ISA
#undef SPECDEC_LANES
#undef SPECDEC_TILES
