// linear in bf16 on tiles (amx_tiles.h), for any number of rows. linear_kernel.h includes this file where SPECDEC_TILES
// names the class of tiles.
//
// An output adds 32 inputs per instruction, one instruction after the other. The left operand is weights, 16 outputs x 32
// inputs, as they lie in memory; the right one is 16 pairs of inputs of up to 16 rows. Two tiles of each make four tiles of
// sums. The number of rows changes the number of columns and of tiles only. No column enters another one's sums, so no bit
// changes.
//
// Few rows are multiplied with the weights in place. For many rows, the weights of a group of outputs are packed in tiles,
// for so many inputs at a time that two tiles' rows of inputs stay in the first-level cache. Sums are kept in memory
// meanwhile.

constexpr std::int64_t kTileInputs = 2 * kTilePairs;
constexpr std::int64_t kTileBytes = kTileHeight * kTileRowBytes;
constexpr std::int64_t kPairOutputs = 2 * kTileHeight;  // outputs of two tiles of weights
constexpr std::int64_t kSumsBytes = 4 * kTileBytes;
constexpr std::int64_t kGroupPairs = 8;    // 256 outputs: with kGroupSteps a quarter of the second-level cache
constexpr std::int64_t kGroupSteps = 16;   // 512 inputs
constexpr std::int64_t kMostTileRows = 512;

// Pairs of bf16 as units that are moved but not multiplied.
struct MovedPairs {
  using Storage = std::uint16_t;
  static constexpr int kStep = 2 * kLanes;
  SPECDEC_INLINE static Vector load(const Storage* from) { return load_vector(from); }
};

// The blocking of one call: for how many outputs and inputs weights are packed at a time.
struct TileGroups {
  std::int64_t pairs, steps, row_pairs;

  explicit TileGroups(std::int64_t num_steps, std::int64_t num_blocks)
      : pairs(num_blocks <= 2 ? 1 : kGroupPairs), steps(num_blocks <= 2 ? num_steps : std::min(num_steps, kGroupSteps)),
        row_pairs((num_blocks + 1) / 2) {}
  std::int64_t weight_bytes() const { return pairs * steps * 2 * kTileBytes; }
  std::int64_t bytes() const { return weight_bytes() + pairs * row_pairs * kSumsBytes; }
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

// Packs the weights of steps [first, last) of up to two tiles of outputs: tile (step, which), zeros where there is no
// output or input.
inline void pack_tiles(const LinearArgs& args, std::int64_t output, std::int64_t count, std::int64_t first,
                       std::int64_t last, char* packed) {
  const auto* weights = static_cast<const std::uint16_t*>(args.weight) + output * args.in_features;
  for (std::int64_t step = first; step < last; ++step) {
    const std::int64_t left = std::min(kTileInputs, args.in_features - step * kTileInputs);
    for (std::int64_t o = 0; o < kPairOutputs; ++o, packed += kTileRowBytes) {
      if (o < count && left == kTileInputs) {
        std::memcpy(packed, weights + o * args.in_features + step * kTileInputs, kTileRowBytes);
      } else {
        std::memset(packed, 0, kTileRowBytes);
        if (o < count) {
          std::memcpy(packed, weights + o * args.in_features + step * kTileInputs, static_cast<std::size_t>(left) * 2);
        }
      }
    }
  }
}

// The addresses of the tiles of two operands.
struct TileWeights {
  const char* first;
  std::int64_t stride;  // bytes between rows of a tile; then between steps, and between the two tiles
  std::int64_t step, other;
};

// Adds `num_steps` steps to the sums in `sums`, or to zero if these are the first steps.
template <int kB, typename Tiles>
void add_tiles(Tiles& tiles, const TileWeights& weights, bool fetches, const char* inputs, std::int64_t columns,
               std::int64_t block_bytes, std::int64_t num_steps, bool is_first, char* sums) {
  if (is_first) {
    tiles.template zero<0>(), tiles.template zero<1>();
    if constexpr (kB == 2) tiles.template zero<2>(), tiles.template zero<3>();
  } else {
    tiles.template load<0>(sums, kTileRowBytes), tiles.template load<1>(sums + kTileBytes, kTileRowBytes);
    if constexpr (kB == 2) {
      tiles.template load<2>(sums + 2 * kTileBytes, kTileRowBytes), tiles.template load<3>(sums + 3 * kTileBytes, kTileRowBytes);
    }
  }
  const std::int64_t row_bytes = 4 * columns;
  for (std::int64_t step = 0; step < num_steps; ++step, inputs += kTilePairs * row_bytes) {
    const char* own = weights.first + step * weights.step;
    tiles.template load<6>(inputs, row_bytes);
    tiles.template load<4>(own, weights.stride);
    tiles.template load<5>(own + weights.other, weights.stride);
    // Fetches the next outputs' weights: they are as many streams as outputs, and hardware follows a few only.
    for (std::int64_t o = 0; fetches && o < kPairOutputs; ++o) __builtin_prefetch(own + (kPairOutputs + o) * weights.stride);
    tiles.template multiply_add<0, 4, 6>();
    tiles.template multiply_add<1, 5, 6>();
    if constexpr (kB == 2) {
      tiles.template load<7>(inputs + block_bytes, row_bytes);
      tiles.template multiply_add<2, 4, 7>();
      tiles.template multiply_add<3, 5, 7>();
    }
  }
  tiles.template store<0>(sums, kTileRowBytes), tiles.template store<1>(sums + kTileBytes, kTileRowBytes);
  if constexpr (kB == 2) {
    tiles.template store<2>(sums + 2 * kTileBytes, kTileRowBytes), tiles.template store<3>(sums + 3 * kTileBytes, kTileRowBytes);
  }
}

// Adds the bias to the sums of one block, whose tiles have an output per row, and writes them.
inline void store_sums(const LinearWork& work, const char* sums, std::int64_t block, std::int64_t output,
                       std::int64_t num_outputs) {
  const LinearArgs& args = work.args;
  const auto* bias = static_cast<const std::uint16_t*>(args.bias);
  const std::int64_t count = work.rows_of(block);
  for (std::int64_t o = 0; o < num_outputs; o += kLanes) {
    const std::int64_t own = std::min<std::int64_t>(kLanes, num_outputs - o);
    Vector added = {};
    for (std::int64_t l = 0; bias != nullptr && l < own; ++l) added[l] = BFloat16::load(bias[output + o + l]);
    for (std::int64_t row = 0; row < count; row += kLanes) {
      Vector square[kLanes];
      for (int l = 0; l < kLanes; ++l) square[l] = load_vector(sums + (o + l) * kTileRowBytes + row * 4);
      transpose(square);
      for (std::int64_t r = 0; r < std::min<std::int64_t>(kLanes, count - row); ++r) {
        const Vector total = bias == nullptr ? square[r] : square[r] + added;
        auto* out = static_cast<std::uint16_t*>(args.out) + (work.row_of(block) + row + r) * args.out_features + output + o;
        std::uint16_t lanes[kLanes];
        store_lanes<BFloat16>(total, lanes);
        std::memcpy(out, lanes, static_cast<std::size_t>(own) * sizeof(lanes[0]));
      }
    }
  }
}

template <typename Tiles>
void tile_outputs(const LinearWork& work, Range blocks, Range outputs, void* buffer) {
  const LinearArgs& args = work.args;
  const std::int64_t num_steps = work.plan.num_steps, columns = work.plan.height;
  const TileGroups groups(num_steps, blocks.end - blocks.begin);
  const bool direct = groups.pairs == 1 && args.in_features % kTileInputs == 0;
  char* packed = static_cast<char*>(buffer);
  char* sums = packed + groups.weight_bytes();
  Tiles tiles;
  tiles.configure(columns);
  for (std::int64_t group = outputs.begin; group < outputs.end; group += groups.pairs * kPairOutputs) {
    const std::int64_t group_end = std::min(outputs.end, group + groups.pairs * kPairOutputs);
    for (std::int64_t step = 0; step < num_steps; step += groups.steps) {
      const std::int64_t steps = std::min(groups.steps, num_steps - step);
      const auto packed_at = [&](std::int64_t output) { return packed + (output - group) / kPairOutputs * steps * 2 * kTileBytes; };
      const auto is_direct = [&](std::int64_t output) { return direct && output + kPairOutputs <= group_end; };
      for (std::int64_t output = group; output < group_end; output += kPairOutputs) {
        if (!is_direct(output)) {
          pack_tiles(args, output, std::min(kPairOutputs, group_end - output), step, step + steps, packed_at(output));
        }
      }
      for (std::int64_t block = blocks.begin; block < blocks.end; block += 2) {
        for (std::int64_t output = group; output < group_end; output += kPairOutputs) {
          const std::int64_t row_bytes = 2 * args.in_features;
          const bool own = is_direct(output);
          const TileWeights weights =
              own ? TileWeights{static_cast<const char*>(args.weight) + output * row_bytes, row_bytes, kTileRowBytes, kTileHeight * row_bytes}
                  : TileWeights{packed_at(output), kTileRowBytes, 2 * kTileBytes, kTileBytes};
          const bool fetches = own && output + 2 * kPairOutputs <= outputs.end;
          const char* inputs = work.prepared(block) + step * kTilePairs * 4 * columns;
          char* own_sums = sums + ((block - blocks.begin) / 2 * groups.pairs + (output - group) / kPairOutputs) * kSumsBytes;
          const bool both = block + 1 < blocks.end;
          (both ? add_tiles<2, Tiles> : add_tiles<1, Tiles>)(tiles, weights, fetches, inputs, columns, work.plan.block_bytes,
                                                             steps, step == 0, own_sums);
          if (step + steps < num_steps) continue;
          const std::int64_t count = std::min(kPairOutputs, group_end - output);
          store_sums(work, own_sums, block, output, count);
          if (both) store_sums(work, own_sums + 2 * kTileBytes, block + 1, output, count);
        }
      }
    }
  }
  tiles.release();
}

template <typename Tiles>
LinearPlan tile_plan(const LinearArgs& args) {
  const std::int64_t num_steps = (args.in_features + kTileInputs - 1) / kTileInputs;
  const std::int64_t columns = even_height(args.num_rows, kTileHeight);
  const std::int64_t block_bytes = (num_steps * kTilePairs * columns * 4 + 63) / 64 * 64;
  const std::int64_t most_blocks = kMostTileRows / kTileHeight;
  const TileGroups few(num_steps, 1), many(num_steps, most_blocks);  // of many blocks, one thread may have few
  const std::int64_t buffer_bytes = args.num_rows <= 2 * kTileHeight ? few.bytes() : std::max(few.bytes(), many.bytes());
  return {prepare_tiles, tile_outputs<Tiles>, num_steps, columns, block_bytes, most_blocks, kPairOutputs, buffer_bytes,
          kWeightRows};
}

constexpr LinearPlans kTilePlans = {plan<Float32, Widened<Float32>>, plan<Float16, Widened<Float16>>, tile_plan<SPECDEC_TILES>};
