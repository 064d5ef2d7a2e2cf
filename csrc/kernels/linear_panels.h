// The sums of linear_kernel.h for many rows. linear_kernel.h includes this file, once per instruction set.
//
// A panel holds the weights of kPanel outputs, transposed so that every lane of a vector belongs to one output. Its order
// is that of the sums in linear_kernel.h: lane after lane, and step after step of a lane. A panel stays in the second-level
// cache while all rows are multiplied with it, in blocks of at most kTileRows whose sums fill the registers. A lane of a
// sum there is a vector of its own here. The products of a sum, their order, and the pairs in which lanes are added are
// the same as there, so no bit changes.

constexpr int kTileSums = SPECDEC_LANES == 16 ? 24 : SPECDEC_LANES == 8 ? 12 : 8;  // vectors; other registers hold operands
constexpr int kBlocks = 2;  // vectors of outputs that share the broadcast of an input
constexpr int kPanel = kBlocks * kLanes;
constexpr int kTileRows = kTileSums / kBlocks;

constexpr std::int64_t kLine = 64;  // bytes of a cache line

// Vectors between the steps of one lane and those of the next. The number is odd: with a power of two, lanes would compete
// for a few cache sets.
SPECDEC_INLINE std::int64_t panel_stride(std::int64_t num_steps) { return kBlocks * num_steps + 1; }

// Units between the steps of one lane and those of the next. Whole vectors are stored where `height` units belong, so the
// last vector needs additional room.
SPECDEC_INLINE std::int64_t block_stride(std::int64_t num_steps, std::int64_t height) { return num_steps * height + kLanes; }

// The lane that is computed as number `index`. In this order, lanes are complete when fold and sums_of would add them.
constexpr int lane_at(int index) {
  int lane = index / (kLanes / 4);
  for (int bit = kLanes / 8, half = 4; bit > 0; bit /= 2, half *= 2) lane += (index & bit) != 0 ? half : 0;
  return lane;
}

// Step `step` of `count` rows, `stride` apart, transposed: each vector holds one lane of all rows. Rows from `count` on
// repeat the last one.
template <typename Product>
SPECDEC_INLINE void load_square(const typename Product::Storage* rows, std::int64_t stride, std::int64_t count,
                                std::int64_t num_numbers, std::int64_t step, Vector square[kLanes]) {
  const std::int64_t first = step * Product::kStep, left = num_numbers - first;
  const typename Product::Storage* from[kLanes];
  for (int i = 0; i < kLanes; ++i) from[i] = rows + std::min<std::int64_t>(i, count - 1) * stride + first;
  if (left >= Product::kStep) return load_transposed<Product>(from, stride, square);
  for (int i = 0; i < kLanes; ++i) square[i] = load_some<Product>(from[i], left);
  transpose(square);
}

template <typename Product>
void pack_panel(const LinearArgs& args, std::int64_t output, std::int64_t count, std::int64_t num_steps, Vector* panel) {
  const auto* weights = static_cast<const typename Product::Storage*>(args.weight);
  for (int o = 0; o < kBlocks; ++o) {
    const std::int64_t first = output + o * kLanes, own = std::min<std::int64_t>(kLanes, output + count - first);
    for (std::int64_t step = 0; own <= 0 && step < num_steps; ++step) {
      for (int i = 0; i < kLanes; ++i) panel[i * panel_stride(num_steps) + step * kBlocks + o] = Vector{};
    }
    for (std::int64_t step = 0; own > 0 && step < num_steps; ++step) {
      Vector square[kLanes];
      load_square<Product>(weights + first * args.in_features, args.in_features, own, args.in_features, step, square);
      for (int i = 0; i < kLanes; ++i) panel[i * panel_stride(num_steps) + step * kBlocks + o] = square[lane_at(i)];
    }
  }
}

// Prepares one block of rows: unit (i, s, r) is the operand of lane lane_at(i) for row r in step s.
template <typename Product>
void pack_rows(const LinearArgs& args, std::int64_t row, std::int64_t count, std::int64_t num_steps, float* block) {
  const auto* rows = static_cast<const typename Product::Storage*>(args.rows) + row * args.row_stride;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    Vector square[kLanes];
    load_square<Product>(rows, args.row_stride, count, args.in_features, step, square);
    for (int i = 0; i < kLanes; ++i) {
      std::memcpy(block + i * block_stride(num_steps, count) + step * count, &square[lane_at(i)], sizeof(Vector));
    }
  }
}

// How many lanes are summed at a time.
constexpr std::int64_t kFewSteps = 16;
static_assert(kFewSteps <= kChunkSteps, "");
SPECDEC_INLINE int lanes_at_once(std::int64_t num_steps) { return num_steps <= kFewSteps ? 2 : 1; }

// Where a tile of kR rows finds its inputs. If one lane is summed at a time, rows are many steps long, and pack_rows has
// transposed them. If two are, a block of rows stays in the first-level cache, and transposing it would take longer than
// it saves: its vectors are those of prepare_rows (linear_rows.h).
template <int kA, int kR>
struct Inputs {
  static constexpr bool kTransposed = kA == 1;
  static constexpr std::int64_t kStepUnits = kTransposed ? kR : kR * kLanes, kRowUnits = kTransposed ? 1 : kLanes;

  // The inputs of lane lane_at(index).
  SPECDEC_INLINE static const float* of_lane(const float* block, int index, std::int64_t num_steps) {
    return block + (kTransposed ? index * block_stride(num_steps, kR) : lane_at(index));
  }
};

// The memory that is read after this panel. Every step fetches one cache line of it; `step_bytes` is 0 if nothing more is
// to be fetched.
struct Ahead {
  const char* from;
  std::int64_t step_bytes;
};

// Units between the inputs that are multiplied and those that are fetched. Processors stop fetching ahead at the end of a
// page, and the last cache is far away where many cores share it.
constexpr std::int64_t kInputsAhead = 2048;

// sums[a][r][o] += steps [first, last) of the a-th of the kA lanes.
template <int kA, int kR, typename Units>
SPECDEC_INLINE void add_steps(const float* const (&inputs)[kA], const Vector* weights, std::int64_t weight_stride,
                              std::int64_t first, std::int64_t last, Ahead ahead, Vector sums[kA][kR][kBlocks]) {
  using From = Inputs<kA, kR>;
  for (std::int64_t step = first; step < last; ++step) {
    __builtin_prefetch(ahead.from + step * ahead.step_bytes, 0, 2);  // into the second-level cache, as in linear_rows.h
    if constexpr (From::kTransposed) __builtin_prefetch(inputs[0] + step * From::kStepUnits + kInputsAhead, 0, 2);
    for (int a = 0; a < kA; ++a) {
      Vector own[kBlocks];
      for (int o = 0; o < kBlocks; ++o) own[o] = weights[a * weight_stride + step * kBlocks + o];
      for (int r = 0; r < kR; ++r) {
        const Vector input = Units::broadcast(inputs[a] + step * From::kStepUnits + r * From::kRowUnits);
        for (int o = 0; o < kBlocks; ++o) sums[a][r][o] = Units::add(sums[a][r][o], input, own[o]);
      }
    }
  }
}

// sums[0] = steps [first, last) of kA lanes, the lanes from index * kA on; the other sums are left over.
template <int kA, int kR, typename Units>
SPECDEC_INLINE void sum_lanes(const float* block, const Vector* weights, std::int64_t num_steps, int index, Range steps,
                              Ahead ahead, Vector sums[kA][kR][kBlocks]) {
  const float* inputs[kA];
  for (int a = 0; a < kA; ++a) inputs[a] = Inputs<kA, kR>::of_lane(block, index * kA + a, num_steps);
  const std::int64_t stride = panel_stride(num_steps);
  ahead.from += index * num_steps * ahead.step_bytes;
  add_steps<kA, kR, Units>(inputs, weights + index * kA * stride, stride, steps.begin, steps.end, ahead, sums);
  for (int half = 1; half < kA; half *= 2) {
    for (int a = 0; a < kA; a += 2 * half) {
      for (int r = 0; r < kR; ++r) {
        for (int o = 0; o < kBlocks; ++o) sums[a][r][o] += sums[a + half][r][o];
      }
    }
  }
}

// How many waiting sums are added to those of the lanes with this index: 2^n neighbours are complete after the n-th.
constexpr int complete_pairs(int index) { return __builtin_ctz(~static_cast<unsigned>(index)); }

// The sums over all lanes of kR rows of many steps. Sums wait on a stack for those that belong with them: a chunk for the
// lane's next chunk, a lane for its neighbour, a pair for the next pair. One loop adds all that waits, because GCC keeps
// sums in memory if several paths meet.
template <int kR, typename Units>
SPECDEC_INLINE void tile_of_many_steps(const float* block, const Vector* weights, std::int64_t num_steps, Ahead ahead,
                                       Vector totals[kTileRows][kBlocks]) {
  Vector waiting[5][kR][kBlocks];
  Vector(*top)[kR][kBlocks] = waiting;
  for (int index = 0; index < kLanes; ++index) {
    Range steps = {0, 0};
    do {
      steps.end = std::min(num_steps, steps.begin + kChunkSteps);
      Vector sums[1][kR][kBlocks] = {};
      sum_lanes<1, kR, Units>(block, weights, num_steps, index, steps, ahead, sums);
      const bool is_last = steps.end == num_steps;
      int complete = (steps.begin > 0 ? 1 : 0) + (is_last ? complete_pairs(index) : 0);
#pragma GCC unroll 1
      for (; complete > 0; --complete) {
        --top;
        for (int r = 0; r < kR; ++r) {
          for (int o = 0; o < kBlocks; ++o) sums[0][r][o] += (*top)[r][o];
        }
      }
      Vector(*to)[kBlocks] = is_last && index + 1 == kLanes ? totals : *top;
      for (int r = 0; r < kR; ++r) {
        for (int o = 0; o < kBlocks; ++o) to[r][o] = sums[0][r][o];
      }
      ++top;
      steps.begin = steps.end;
    } while (steps.begin < num_steps);
  }
}

// Sums the kIndex-th kA lanes, adds those of waiting[0], waiting[1], ... that are complete, and lets the result wait.
template <int kIndex, int kA, int kR, typename Units>
SPECDEC_INLINE void add_lanes(const float* block, const Vector* weights, std::int64_t num_steps, Ahead ahead,
                              Vector (*waiting)[kR][kBlocks], Vector totals[kTileRows][kBlocks]) {
  constexpr int kComplete = complete_pairs(kIndex);
  Vector sums[kA][kR][kBlocks] = {};
  sum_lanes<kA, kR, Units>(block, weights, num_steps, kIndex, {0, num_steps}, ahead, sums);
  Vector(*to)[kBlocks] = kIndex + 1 == kLanes / kA ? totals : waiting[kComplete];
  for (int r = 0; r < kR; ++r) {
    for (int o = 0; o < kBlocks; ++o) {
      for (int level = 0; level < kComplete; ++level) sums[0][r][o] += waiting[level][r][o];
      to[r][o] = sums[0][r][o];
    }
  }
  asm volatile("" : : "r"(waiting) : "memory");  // GCC 12 would otherwise move sums between registers and memory again
}

// The same of few steps, kA lanes at a time. No branch chooses what is added, as a wrong guess costs as much as a step.
template <int kA, int kR, typename Units, int... kIndices>
SPECDEC_INLINE void tile_of_few_steps(const float* block, const Vector* weights, std::int64_t num_steps, Ahead ahead,
                                      Vector totals[kTileRows][kBlocks], std::integer_sequence<int, kIndices...>) {
  Vector waiting[5][kR][kBlocks];
  (add_lanes<kIndices, kA, kR, Units>(block, weights, num_steps, ahead, waiting, totals), ...);
}

// The sums over all lanes of kR rows and a panel's outputs, kA lanes at a time. If steps are few, it is faster to add sums
// in registers than to store them; if steps are many, it is faster to use each weight for many rows.
template <int kA, int kR, typename Units>
void tile(const float* block, const Vector* weights, std::int64_t num_steps, Ahead ahead,
          Vector totals[kTileRows][kBlocks]) {
  if constexpr (kA == 1) {
    tile_of_many_steps<kR, Units>(block, weights, num_steps, ahead, totals);
  } else {
    tile_of_few_steps<kA, kR, Units>(block, weights, num_steps, ahead, totals,
                                     std::make_integer_sequence<int, kLanes / kA>());
  }
}

using Tile = void (*)(const float*, const Vector*, std::int64_t, Ahead, Vector (*)[kBlocks]);

template <int kA, typename Units, int... kBelow>
Tile tile_of_rows(std::int64_t count, std::integer_sequence<int, kBelow...>) {
  static constexpr Tile kTiles[] = {tile<kA, kBelow + 1, Units>...};
  return kTiles[count - 1];
}

template <typename Units>
Tile tile_of(int at_once, std::int64_t count) {
  return at_once == 1 ? tile_of_rows<1, Units>(count, std::make_integer_sequence<int, kTileRows>())
                      : tile_of_rows<2, Units>(count, std::make_integer_sequence<int, kTileRows / 2>());
}

// Adds the bias and writes `num_outputs` outputs of `count` rows.
template <typename Format>
void store_tile(const LinearArgs& args, Vector totals[kTileRows][kBlocks], std::int64_t row, std::int64_t count,
                std::int64_t output, std::int64_t num_outputs) {
  using Storage = typename Format::Storage;
  const Storage* bias = static_cast<const Storage*>(args.bias);
  if (bias == nullptr && num_outputs == kPanel) {  // most tiles; what follows takes several instructions more for a vector
    Storage* out = static_cast<Storage*>(args.out) + row * args.out_features + output;
    for (std::int64_t r = 0; r < count; ++r, out += args.out_features) {
      for (int o = 0; o < kBlocks; ++o) store_lanes<Format>(totals[r][o], out + o * kLanes);
    }
    return;
  }
  for (int o = 0; o < kBlocks && o * kLanes < num_outputs; ++o) {
    const std::int64_t first = output + o * kLanes, own = std::min<std::int64_t>(kLanes, num_outputs - o * kLanes);
    Vector added = {};
    for (std::int64_t l = 0; bias != nullptr && l < own; ++l) added[l] = Format::load(bias[first + l]);
    for (std::int64_t r = 0; r < count; ++r) {
      Storage* out = static_cast<Storage*>(args.out) + (row + r) * args.out_features + first;
      const Vector total = bias == nullptr ? totals[r][o] : totals[r][o] + added;
      if (own == kLanes) {
        store_lanes<Format>(total, out);
      } else {
        Storage lanes[kLanes];
        store_lanes<Format>(total, lanes);
        std::memcpy(out, lanes, static_cast<std::size_t>(own) * sizeof(Storage));
      }
    }
  }
}

template <typename Product>
void prepare_panels(const LinearWork& work, std::int64_t block) {
  pack_rows<Product>(work.args, work.row_of(block), work.rows_of(block), work.plan.num_steps,
                     reinterpret_cast<float*>(work.prepared(block)));
}

template <typename Format, typename Product>
void panel_outputs(const LinearWork& work, Range blocks, Range outputs, void* buffer) {
  const std::int64_t num_steps = work.plan.num_steps;
  const std::int64_t row_bytes = work.args.in_features * static_cast<std::int64_t>(sizeof(typename Format::Storage));
  const int at_once = lanes_at_once(num_steps);
  Vector* panel = static_cast<Vector*>(buffer);
  for (std::int64_t output = outputs.begin; output < outputs.end; output += kPanel) {
    const std::int64_t own = std::min<std::int64_t>(kPanel, outputs.end - output);
    pack_panel<Product>(work.args, output, own, num_steps, panel);
    // The next panel's weights; the last blocks of rows fetch them while they are multiplied with this panel. What the
    // first blocks fetched would be evicted by the inputs of the others.
    const char* weights = static_cast<const char*>(work.args.weight);
    const char* next = weights + (output + kPanel) * row_bytes;
    const char* end = weights + std::min(outputs.end, output + 2 * kPanel) * row_bytes;
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
      const std::int64_t count = work.rows_of(block);
      const std::int64_t fetched = kLanes / at_once * num_steps * kLine, later = (blocks.end - block - 1) * fetched;
      const bool fetches = next < end && later < end - next;
      const Ahead ahead = fetches ? Ahead{next, kLine} : Ahead{reinterpret_cast<const char*>(panel), 0};
      if (fetches) next += fetched;
      Vector totals[kTileRows][kBlocks];
      tile_of<typename Product::Units>(at_once, count)(reinterpret_cast<const float*>(work.prepared(block)), panel,
                                                       num_steps, ahead, totals);
      store_tile<Format>(work.args, totals, work.row_of(block), count, output, own);
    }
  }
}
