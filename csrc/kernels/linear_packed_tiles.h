// linear in bf16 on tiles, for many rows, and linear_transposed for any number of rows; linear_tiles.h includes this file.
//
// Inputs are the left operand, copied to tiles. Weights are the right one, so each call packs them, a group of outputs and a
// few steps at a time; then the sums have a row per row of the output. What a thread holds meanwhile, packed weights
// and sums, stays in the second-level cache. Two blocks of inputs are multiplied with all weights of the group while the
// next two are fetched.

constexpr std::int64_t kLeastPackedRows = 256;     // below, packing takes longer than reading weights once per two blocks
constexpr std::int64_t kMostPackedRows = 1024;     // rows whose inputs are prepared at a time
constexpr std::int64_t kPackedSteps = 64;          // 2048 inputs; with fewer, sums are loaded and stored too often
constexpr std::int64_t kMostGroupPairs = 8;        // 256 outputs: with kPackedSteps half of the second-level cache
constexpr std::int64_t kHeldSumsBytes = 1 << 20;   // the other half
constexpr std::int64_t kPackedWeightRows = 32;     // LinearPlan::weight_rows
constexpr std::int64_t kLineBytes = 64;

// The blocking of one call.
struct TileGroups {
  std::int64_t pairs, steps;  // pairs of tiles of outputs in a group; steps whose weights are packed at a time

  TileGroups(std::int64_t num_steps, std::int64_t num_blocks)
      : pairs(std::min(kMostGroupPairs, kHeldSumsBytes / kSumsBytes / ((num_blocks + 1) / 2))),
        steps(std::min(num_steps, kPackedSteps)) {}
  std::int64_t weight_bytes() const { return pairs * steps * 2 * kTileBytes; }
};

// Prepares a block of rows: tile (step), zeros after the last row and input.
inline void prepare_packed_tiles(const LinearWork& work, std::int64_t block) {
  const LinearArgs& args = work.args;
  const std::int64_t count = work.rows_of(block), num_steps = work.plan.num_steps;
  const auto* rows = static_cast<const std::uint16_t*>(args.rows) + work.row_of(block) * args.row_stride;
  for (std::int64_t row = 0; row < kTileHeight; ++row) {
    char* to = work.prepared(block) + row * kTileRowBytes;
    for (std::int64_t step = 0; step < num_steps; ++step, to += kTileBytes) {
      if (row < count) {
        copy_step(rows + row * args.row_stride, args.in_features, step, to);
      } else {
        std::memset(to, 0, kTileRowBytes);
      }
    }
  }
}

// Weights stored as [out_features, in_features]: packing transposes them.
struct WeightsByOutput {
  // Packs the weights of the given outputs and steps: tile (pair of tiles of outputs, step, which), whose rows are pairs of
  // inputs. Columns after the last output repeat the last one; their sums are not written.
  static void pack(const LinearArgs& args, Range outputs, Range steps, char* packed) {
    for (std::int64_t output = outputs.begin; output < outputs.end; output += kPairOutputs) {
      pack_pair(args, output, std::min(kPairOutputs, outputs.end - output), steps, packed);
      packed += (steps.end - steps.begin) * 2 * kTileBytes;
    }
  }

 private:
  static void pack_pair(const LinearArgs& args, std::int64_t output, std::int64_t count, Range steps, char* packed) {
    const auto* weights = static_cast<const std::uint16_t*>(args.weight) + output * args.in_features;
    for (std::int64_t o = 0; o < kPairOutputs; o += kLanes) {
      const std::int64_t own = std::max<std::int64_t>(1, std::min<std::int64_t>(kLanes, count - o));
      const auto* from = weights + std::min(o, count - 1) * args.in_features;
      char* to = packed + o / kTileHeight * kTileBytes + o % kTileHeight * 4;
      for (std::int64_t step = steps.begin; step < steps.end; ++step, to += 2 * kTileBytes) {
        for (std::int64_t pair = 0; pair < kTilePairs; pair += kLanes) {
          Vector square[kLanes] = {};
          const std::int64_t unit = step * kTilePairs + pair;
          if (2 * unit < args.in_features) load_square<MovedPairs>(from, args.in_features, own, args.in_features, unit / kLanes, square);
          for (int l = 0; l < kLanes; ++l) std::memcpy(to + (pair + l) * kTileRowBytes, &square[l], sizeof(Vector));
        }
      }
    }
  }
};

// Weights stored as [in_features, out_features]: packing interleaves the weights of two inputs.
struct WeightsByInput {
  // As above. The weights of one input lie side by side, so all outputs are packed before the next pair of inputs. Columns
  // after the last output and rows after the last input are zero.
  static void pack(const LinearArgs& args, Range outputs, Range steps, char* packed) {
    const auto* weights = static_cast<const std::uint16_t*>(args.weight);
    const std::int64_t pair_bytes = (steps.end - steps.begin) * 2 * kTileBytes;
    for (std::int64_t step = steps.begin; step < steps.end; ++step, packed += 2 * kTileBytes) {
      for (std::int64_t pair = 0; pair < kTilePairs; ++pair) {
        char* to = packed + pair * kTileRowBytes;
        for (std::int64_t output = outputs.begin; output < outputs.end; output += kPairOutputs, to += pair_bytes) {
          const std::int64_t first = step * kTileInputs + 2 * pair, count = std::min(kPairOutputs, outputs.end - output);
          const std::int64_t inputs = std::max<std::int64_t>(0, std::min<std::int64_t>(2, args.in_features - first));
          pack_two(weights + first * args.out_features + output, args.out_features, inputs, count, to);
        }
      }
    }
  }

 private:
  static constexpr std::int64_t kRowsAhead = 16;  // whose weights are fetched early: a row of weights is short

  static void pack_two(const std::uint16_t* weights, std::int64_t stride, std::int64_t inputs, std::int64_t count, char* to) {
    std::uint16_t copied[2][kPairOutputs];
    const std::uint16_t* from[2] = {weights, weights + stride};
    for (int i = 0; i < 2; ++i) {
      __builtin_prefetch(from[i] + kRowsAhead * stride);
      if (i < inputs && count == kPairOutputs) continue;
      std::memset(copied[i], 0, sizeof(copied[i]));
      if (i < inputs) std::memcpy(copied[i], from[i], static_cast<std::size_t>(count) * sizeof(copied[i][0]));
      from[i] = copied[i];
    }
    for (std::int64_t o = 0; o < kPairOutputs; o += kLanes) {
      const Words first = __builtin_convertvector(load_as<Halves>(from[0] + o), Words);
      const Words second = __builtin_convertvector(load_as<Halves>(from[1] + o), Words);
      store_as(to + o / kTileHeight * kTileBytes + o % kTileHeight * 4, first | second << 16);
    }
  }
};

// What one multiplication fetches: some cache lines in each step.
struct Fetched {
  const char* first;
  std::int64_t lines_per_step;
};

// Adds `num_steps` steps to the sums of kB blocks and two tiles of outputs, or to zero if these are the first steps.
template <int kB, typename Tiles>
void add_packed_tiles(Tiles& tiles, const char* weights, const char* inputs, std::int64_t block_bytes, std::int64_t num_steps,
                      bool is_first, char* sums, Fetched fetched) {
  load_sums<kB>(tiles, is_first, sums);
  for (std::int64_t step = 0; step < num_steps; ++step, weights += 2 * kTileBytes, inputs += kTileBytes) {
    tiles.template load<4>(inputs, kTileRowBytes);
    tiles.template load<6>(weights, kTileRowBytes);
    tiles.template load<7>(weights + kTileBytes, kTileRowBytes);
    for (std::int64_t l = 0; l < fetched.lines_per_step; ++l, fetched.first += kLineBytes) __builtin_prefetch(fetched.first, 0, 2);
    tiles.template multiply_add<0, 4, 6>();
    tiles.template multiply_add<1, 4, 7>();
    if constexpr (kB == 2) {
      tiles.template load<5>(inputs + block_bytes, kTileRowBytes);
      tiles.template multiply_add<2, 5, 6>();
      tiles.template multiply_add<3, 5, 7>();
    }
  }
  write_sums<kB>(tiles, sums);
}

// Adds the bias to the sums of one block, whose tiles have a row per row, and writes them.
inline void store_packed_sums(const LinearWork& work, const char* sums, std::int64_t block, std::int64_t output,
                              std::int64_t num_outputs) {
  const LinearArgs& args = work.args;
  const std::int64_t count = work.rows_of(block);
  for (std::int64_t o = 0; o < num_outputs; o += kLanes) {
    const std::int64_t own = std::min<std::int64_t>(kLanes, num_outputs - o);
    const Vector added = args.bias == nullptr ? Vector{} : load_bias(args, output + o, own);
    const char* from = sums + o / kTileHeight * kTileBytes + o % kTileHeight * 4;
    auto* out = static_cast<std::uint16_t*>(args.out) + work.row_of(block) * args.out_features + output + o;
    for (std::int64_t row = 0; row < count; ++row, out += args.out_features) {
      const Vector sum = load_vector(from + row * kTileRowBytes);
      store_outputs(args.bias == nullptr ? sum : sum + added, own, out);
    }
  }
}

// What multiplication `part` of `parts` fetches of the next two blocks' inputs, or nothing if these are the last ones.
inline Fetched fetched_share(const LinearWork& work, const char* inputs, std::int64_t steps, std::int64_t part,
                             std::int64_t parts, bool any) {
  if (!any) return {inputs, 0};
  const std::int64_t tile_lines = kTileBytes / kLineBytes, lines = (2 * tile_lines + parts - 1) / parts;
  const std::int64_t first = part * lines * steps, block_lines = steps * tile_lines;
  return {inputs + (2 + first / block_lines) * work.plan.block_bytes + first % block_lines * kLineBytes, lines};
}

template <typename Tiles, typename Weights>
void packed_tile_outputs(const LinearWork& work, Range blocks, Range outputs, void* buffer) {
  const LinearArgs& args = work.args;
  const std::int64_t num_steps = work.plan.num_steps;
  const TileGroups groups(num_steps, blocks.end - blocks.begin);
  char* packed = static_cast<char*>(buffer);
  char* sums = packed + groups.weight_bytes();
  Tiles tiles;
  tiles.configure(kTilePairs);
  for (std::int64_t group = outputs.begin; group < outputs.end; group += groups.pairs * kPairOutputs) {
    const std::int64_t group_end = std::min(outputs.end, group + groups.pairs * kPairOutputs);
    for (std::int64_t step = 0; step < num_steps; step += groups.steps) {
      const std::int64_t steps = std::min(groups.steps, num_steps - step);
      const bool is_last = step + steps == num_steps;
      const auto packed_at = [&](std::int64_t output) { return packed + (output - group) / kPairOutputs * steps * 2 * kTileBytes; };
      Weights::pack(args, {group, group_end}, {step, step + steps}, packed);
      for (std::int64_t block = blocks.begin; block < blocks.end; block += 2) {
        const char* inputs = work.prepared(block) + step * kTileBytes;
        const bool both = block + 1 < blocks.end;
        for (std::int64_t output = group; output < group_end; output += kPairOutputs) {
          const std::int64_t index = (block - blocks.begin) / 2 * groups.pairs + (output - group) / kPairOutputs;
          char* own_sums = sums + (steps == num_steps ? 0 : index * kSumsBytes);
          const Fetched fetched = fetched_share(work, inputs, steps, (output - group) / kPairOutputs,
                                                (group_end - group + kPairOutputs - 1) / kPairOutputs, block + 2 < blocks.end);
          (both ? add_packed_tiles<2, Tiles> : add_packed_tiles<1, Tiles>)(tiles, packed_at(output), inputs,
                                                                           work.plan.block_bytes, steps, step == 0, own_sums, fetched);
          if (!is_last) continue;
          const std::int64_t count = std::min(kPairOutputs, group_end - output);
          store_packed_sums(work, own_sums, block, output, count);
          if (both) store_packed_sums(work, own_sums + 2 * kTileBytes, block + 1, output, count);
        }
      }
    }
  }
  tiles.release();
}

template <typename Tiles, typename Weights>
LinearPlan packed_tile_plan(const LinearArgs& args) {
  const std::int64_t num_steps = (args.in_features + kTileInputs - 1) / kTileInputs;
  const std::int64_t most_blocks = kMostPackedRows / kTileHeight;
  const TileGroups largest(num_steps, 1);  // of many blocks, one thread may have few
  const std::int64_t sums_bytes = num_steps > largest.steps ? kHeldSumsBytes : kSumsBytes;
  return {prepare_packed_tiles, packed_tile_outputs<Tiles, Weights>, num_steps, kTileHeight, num_steps * kTileBytes, most_blocks,
          kPairOutputs, largest.weight_bytes() + sums_bytes, kPackedWeightRows};
}
