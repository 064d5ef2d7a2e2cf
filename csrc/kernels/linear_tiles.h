// linear in bf16 on tiles (amx_tiles.h), for any number of rows. linear_kernel.h includes this file where SPECDEC_TILES
// names the class of tiles.
//
// An output adds 32 inputs per instruction, one instruction after the other. One operand is 16 outputs x 32 inputs of the
// weights, the other one 16 rows x 32 inputs. Two tiles of each make four tiles of sums. The number of rows decides the
// number of tiles and which operand is the left one, but a sum's products are the same numbers in the same order. No row
// enters another one's sums, so no bit of a number changes; where an input and its weight are both NaN, the left one
// decides the NaN's bits.
//
// The left operand lies in the tile as in memory; the right one has pairs of inputs in columns, so it is transposed. With
// few rows, weights are the left operand and are multiplied in place (this file). With many rows, weights are the right
// one (linear_packed_tiles.h).

constexpr std::int64_t kTileInputs = 2 * kTilePairs;
constexpr std::int64_t kTileBytes = kTileHeight * kTileRowBytes;
constexpr std::int64_t kPairOutputs = 2 * kTileHeight;  // outputs of two tiles of weights
constexpr std::int64_t kSumsBytes = 4 * kTileBytes;

// Pairs of bf16 as units that are moved but not multiplied.
struct MovedPairs {
  using Storage = std::uint16_t;
  static constexpr int kStep = 2 * kLanes;
  SPECDEC_INLINE static Vector load(const Storage* from) { return load_vector(from); }
};

// Prepares a block of rows: unit (step, pair, row), zeros after the last input.
inline void prepare_tiles(const LinearWork& work, std::int64_t block) {
  const LinearArgs& args = work.args;
  const std::int64_t columns = work.plan.height, count = work.rows_of(block);
  const auto* rows = static_cast<const std::uint16_t*>(args.rows) + work.row_of(block) * args.row_stride;
  float* units = reinterpret_cast<float*>(work.prepared(block));
  for (std::int64_t pair = 0; pair < work.plan.num_steps * kTilePairs; pair += kLanes) {
    for (std::int64_t row = 0; row < columns; row += kLanes) {
      const std::int64_t own = std::min<std::int64_t>(kLanes, columns - row);
      Vector square[kLanes] = {};
      const std::int64_t here = std::min<std::int64_t>(kLanes, count - row);
      const bool any = here > 0 && 2 * pair < args.in_features;
      if (any) load_square<MovedPairs>(rows + row * args.row_stride, args.row_stride, here, args.in_features, pair / kLanes, square);
      for (int l = 0; l < kLanes; ++l) {
        float* to = units + (pair + l) * columns + row;
        if (own == kLanes) {
          std::memcpy(to, &square[l], sizeof(Vector));
        } else {
          std::memcpy(to, &square[l], static_cast<std::size_t>(own) * sizeof(float));
        }
      }
    }
  }
}

// Copies 32 inputs of a row of `in_features` numbers, zeros after the last one.
SPECDEC_INLINE void copy_step(const std::uint16_t* row, std::int64_t in_features, std::int64_t step, char* to) {
  const std::int64_t left = std::min(kTileInputs, in_features - step * kTileInputs);
  if (left == kTileInputs) {
    std::memcpy(to, row + step * kTileInputs, kTileRowBytes);
  } else {
    std::memset(to, 0, kTileRowBytes);
    std::memcpy(to, row + step * kTileInputs, static_cast<std::size_t>(left) * sizeof(*row));
  }
}

// Copies the weights of up to two tiles of outputs that cannot be multiplied in place: tile (step, which), zeros where
// there is no output or input.
inline void copy_weights(const LinearArgs& args, std::int64_t output, std::int64_t count, Range steps, char* to) {
  const auto* weights = static_cast<const std::uint16_t*>(args.weight) + output * args.in_features;
  for (std::int64_t o = 0; o < kPairOutputs; ++o) {
    char* own = to + o * kTileRowBytes;
    for (std::int64_t step = steps.begin; step < steps.end; ++step, own += 2 * kTileBytes) {
      if (o < count) {
        copy_step(weights + o * args.in_features, args.in_features, step, own);
      } else {
        std::memset(own, 0, kTileRowBytes);
      }
    }
  }
}

// The addresses of two tiles of weights.
struct TileWeights {
  const char* first;
  std::int64_t stride;  // bytes between rows of a tile; then between steps, and between the two tiles
  std::int64_t step, other;
  const char* next;     // of weights that are fetched meanwhile; null: none
};

// The sums of kB blocks and two tiles of outputs are tiles 0 to 2 * kB - 1: zero at first, later read from `sums`, and
// written there.
template <int kB, typename Tiles>
SPECDEC_INLINE void load_sums(Tiles& tiles, bool is_first, const char* sums) {
  if (is_first) {
    tiles.template zero<0>(), tiles.template zero<1>();
    if constexpr (kB == 2) tiles.template zero<2>(), tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, kTileRowBytes), tiles.template load<1>(sums + kTileBytes, kTileRowBytes);
    if constexpr (kB == 2) {
      tiles.template load<2>(sums + 2 * kTileBytes, kTileRowBytes), tiles.template load<3>(sums + 3 * kTileBytes, kTileRowBytes);
    }
  }
}

template <int kB, typename Tiles>
SPECDEC_INLINE void write_sums(const Tiles& tiles, char* sums) {
  tiles.template store<0>(sums, kTileRowBytes), tiles.template store<1>(sums + kTileBytes, kTileRowBytes);
  if constexpr (kB == 2) {
    tiles.template store<2>(sums + 2 * kTileBytes, kTileRowBytes), tiles.template store<3>(sums + 3 * kTileBytes, kTileRowBytes);
  }
}

// Adds `num_steps` steps to the sums of two tiles of outputs for kB blocks of inputs, or to zero if these are the first
// steps. Fetches the next weights of the outputs `fetched`.
template <int kB, typename Tiles>
void add_tiles(Tiles& tiles, const TileWeights& weights, Range fetched, const char* inputs, std::int64_t columns,
               std::int64_t block_bytes, std::int64_t num_steps, bool is_first, char* sums) {
  if (weights.next == nullptr) fetched = {0, 0};
  load_sums<kB>(tiles, is_first, sums);
  const std::int64_t row_bytes = 4 * columns;
  for (std::int64_t step = 0; step < num_steps; ++step, inputs += kTilePairs * row_bytes) {
    const char* own = weights.first + step * weights.step;
    tiles.template load<6>(inputs, row_bytes);
    tiles.template load<4>(own, weights.stride);
    tiles.template load<5>(own + weights.other, weights.stride);
    // Rows of weights are as many streams as outputs, and hardware follows a few only.
    for (std::int64_t o = fetched.begin; o < fetched.end; ++o) {
      __builtin_prefetch(weights.next + step * weights.step + o * weights.stride);
    }
    tiles.template multiply_add<0, 4, 6>();
    tiles.template multiply_add<1, 5, 6>();
    if constexpr (kB == 2) {
      tiles.template load<7>(inputs + block_bytes, row_bytes);
      tiles.template multiply_add<2, 4, 7>();
      tiles.template multiply_add<3, 5, 7>();
    }
  }
  write_sums<kB>(tiles, sums);
}

// Writes kLanes outputs of a row, or `count` of them.
SPECDEC_INLINE void store_outputs(Vector values, std::int64_t count, std::uint16_t* out) {
  if (count == kLanes) return store_lanes<BFloat16>(values, out);
  std::uint16_t lanes[kLanes];
  store_lanes<BFloat16>(values, lanes);
  std::memcpy(out, lanes, static_cast<std::size_t>(count) * sizeof(lanes[0]));
}

// The biases of kLanes outputs, or of `count` of them.
SPECDEC_INLINE Vector load_bias(const LinearArgs& args, std::int64_t output, std::int64_t count) {
  const auto* bias = static_cast<const std::uint16_t*>(args.bias) + output;
  Vector added = {};
  for (std::int64_t l = 0; l < count; ++l) added[l] = BFloat16::load(bias[l]);
  return added;
}

// Adds the bias to the sums of one block, whose tiles have an output per row, and writes them.
inline void store_sums(const LinearWork& work, const char* sums, std::int64_t block, std::int64_t output,
                       std::int64_t num_outputs) {
  const LinearArgs& args = work.args;
  const std::int64_t count = work.rows_of(block);
  for (std::int64_t o = 0; o < num_outputs; o += kLanes) {
    const std::int64_t own = std::min<std::int64_t>(kLanes, num_outputs - o);
    const Vector added = args.bias == nullptr ? Vector{} : load_bias(args, output + o, own);
    for (std::int64_t row = 0; row < count; row += kLanes) {
      Vector square[kLanes];
      for (int l = 0; l < kLanes; ++l) square[l] = load_vector(sums + (o + l) * kTileRowBytes + row * 4);
      transpose(square);
      auto* out = static_cast<std::uint16_t*>(args.out) + (work.row_of(block) + row) * args.out_features + output + o;
      for (std::int64_t r = 0; r < std::min<std::int64_t>(kLanes, count - row); ++r, out += args.out_features) {
        store_outputs(args.bias == nullptr ? square[r] : square[r] + added, own, out);
      }
    }
  }
}

constexpr std::int64_t kSlicedInputBytes = 1 << 20;  // inputs of a slice: half of the second-level cache
constexpr std::int64_t kMostSliceSteps = 128;        // so the weights of two tiles of outputs are an eighth of it
constexpr std::int64_t kLeastSliceSteps = 16;        // with fewer, sums are loaded and stored too often
constexpr std::int64_t kSlicedPairs = 8;             // pairs of tiles of outputs that share a slice of inputs

// Steps of a slice. Slices are about equally long.
inline std::int64_t steps_of_slice(std::int64_t num_steps, std::int64_t step_bytes) {
  const std::int64_t most = std::clamp(kSlicedInputBytes / step_bytes, kLeastSliceSteps, kMostSliceSteps);
  const std::int64_t slices = (num_steps + most - 1) / most;
  return (num_steps + slices - 1) / slices;
}

// Computes few rows with the weights in place. The weights of two tiles of outputs are in the second-level cache from one
// pair of blocks to the next, while those of the next outputs are fetched. So are the inputs, from one pair of tiles to the
// next: if they are too many, they are multiplied slice by slice, and the sums of several pairs of tiles are kept in memory
// between two slices.
template <typename Tiles>
void tile_outputs(const LinearWork& work, Range blocks, Range outputs, void* buffer) {
  const LinearArgs& args = work.args;
  const std::int64_t num_steps = work.plan.num_steps, columns = work.plan.height, row_bytes = 2 * args.in_features;
  const std::int64_t num_blocks = blocks.end - blocks.begin, num_pairs = (num_blocks + 1) / 2;
  const std::int64_t step_bytes = kTilePairs * 4 * columns, slice = steps_of_slice(num_steps, num_blocks * step_bytes);
  const std::int64_t group_pairs = slice == num_steps ? 1 : kSlicedPairs;
  char* sums = static_cast<char*>(buffer);
  char* copied = sums + group_pairs * num_pairs * kSumsBytes;
  Tiles tiles;
  tiles.configure(columns);
  // Two tiles of weights in a slice; those of `next` are fetched meanwhile, a part of them for each pair of blocks.
  const auto multiply = [&](const TileWeights& weights, Range steps, std::int64_t output, char* pair_sums) {
    for (std::int64_t pair = 0; pair < num_pairs; ++pair, pair_sums += kSumsBytes) {
      const std::int64_t block = blocks.begin + 2 * pair;
      const bool both = block + 1 < blocks.end;
      const char* inputs = work.prepared(block) + steps.begin * step_bytes;
      const Range fetched = {kPairOutputs * pair / num_pairs, kPairOutputs * (pair + 1) / num_pairs};
      (both ? add_tiles<2, Tiles> : add_tiles<1, Tiles>)(tiles, weights, fetched, inputs, columns, work.plan.block_bytes,
                                                         steps.end - steps.begin, steps.begin == 0, pair_sums);
      if (steps.end < num_steps) continue;
      const std::int64_t count = std::min(kPairOutputs, outputs.end - output);
      store_sums(work, pair_sums, block, output, count);
      if (both) store_sums(work, pair_sums + 2 * kTileBytes, block + 1, output, count);
    }
  };
  const auto in_place = [&](std::int64_t output) {
    return args.in_features % kTileInputs == 0 && output + kPairOutputs <= outputs.end;
  };
  const auto weights_at = [&](std::int64_t output, std::int64_t step) {
    return static_cast<const char*>(args.weight) + output * row_bytes + step * kTileRowBytes;
  };
  for (std::int64_t group = outputs.begin; group < outputs.end; group += group_pairs * kPairOutputs) {
    const std::int64_t group_end = std::min(outputs.end, group + group_pairs * kPairOutputs);
    for (Range steps = {0, 0}; steps.begin < num_steps; steps.begin = steps.end) {
      steps.end = std::min(steps.begin + slice, num_steps);
      for (std::int64_t output = group; output < group_end; output += kPairOutputs) {
        char* pair_sums = sums + (output - group) / kPairOutputs * num_pairs * kSumsBytes;
        if (!in_place(output)) {
          copy_weights(args, output, std::min(kPairOutputs, outputs.end - output), steps, copied);
          multiply({copied, kTileRowBytes, 2 * kTileBytes, kTileBytes, nullptr}, steps, output, pair_sums);
          continue;
        }
        const bool ends_slice = output + kPairOutputs >= group_end, returns = ends_slice && steps.end < num_steps;
        const std::int64_t next = returns ? group : output + kPairOutputs;
        const std::int64_t next_step = returns ? steps.end : ends_slice ? 0 : steps.begin;
        multiply({weights_at(output, steps.begin), row_bytes, kTileRowBytes, kTileHeight * row_bytes,
                  in_place(next) ? weights_at(next, next_step) : nullptr},
                 steps, output, pair_sums);
      }
    }
  }
  tiles.release();
}

#include "kernels/linear_packed_tiles.h"

template <typename Tiles>
LinearPlan tile_plan(const LinearArgs& args) {
  if (args.num_rows >= kLeastPackedRows) return packed_tile_plan<Tiles, WeightsByOutput>(args);
  const std::int64_t num_steps = (args.in_features + kTileInputs - 1) / kTileInputs;
  const std::int64_t columns = even_height(args.num_rows, kTileHeight);
  const std::int64_t block_bytes = (num_steps * kTilePairs * columns * 4 + 63) / 64 * 64;
  const std::int64_t blocks = (args.num_rows + columns - 1) / columns;
  const std::int64_t sums_bytes = kSlicedPairs * ((blocks + 1) / 2) * kSumsBytes;
  return {prepare_tiles, tile_outputs<Tiles>, num_steps, columns, block_bytes, blocks, kPairOutputs,
          sums_bytes + std::min(num_steps, kMostSliceSteps) * 2 * kTileBytes, kWeightRows};
}

constexpr LinearPlanner kTransposedTilePlan = packed_tile_plan<SPECDEC_TILES, WeightsByInput>;
constexpr LinearPlans kTilePlans = {plan<Float32, Widened<Float32>>, plan<Float16, Widened<Float16>>, tile_plan<SPECDEC_TILES>};
