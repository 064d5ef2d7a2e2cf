// Few rows, multiplied with the weights in place, with lanes along the inputs. linear_kernel.h includes this file, once per
// instruction set.
//
// Up to kMostRows rows are one block. If there are several blocks, the weights of a group of outputs stay in the
// second-level cache while all blocks are multiplied with them. A block's inputs are read again for every few outputs, so
// they must stay in the first-level cache: long rows are multiplied slice by slice, and kGranule outputs' sums are kept in
// memory between two slices.

constexpr int kMostRows = SPECDEC_LANES == 16 ? 8 : 2;
constexpr std::int64_t kGranule = 12;          // outputs; a multiple of outputs_of every number of rows
constexpr std::int64_t kGroupBytes = 1 << 17;  // weights of a group: an eighth of a second-level cache
constexpr std::int64_t kDistance = 1 << 16;    // bytes between the weights that are multiplied and those that are fetched
constexpr std::int64_t kSliceBytes = 1 << 14;  // inputs of a slice: half a first-level cache
constexpr std::int64_t kPageBytes = 1 << 12;   // processors fetch on their own within a page
static_assert(kMostRows <= kTileRows, "a block's totals are a tile");

// Outputs that a block of `rows` rows computes at once: as many sums as there are registers.
constexpr int outputs_of(int rows) { return rows <= 6 ? 4 : 3; }

// Steps of a block of `rows` rows whose inputs stay in the first-level cache.
constexpr std::int64_t most_steps(int rows) {
  return std::min(kChunkSteps, kSliceBytes / (rows * static_cast<std::int64_t>(sizeof(Vector))));
}

// The end of the slice that begins at step `first`. Slices of a chunk are about equally long.
SPECDEC_INLINE std::int64_t slice_end(std::int64_t first, std::int64_t num_steps, std::int64_t most) {
  const std::int64_t left = std::min(num_steps, (first / kChunkSteps + 1) * kChunkSteps) - first;
  const std::int64_t slices = (left + most - 1) / most;
  return first + (left + slices - 1) / slices;
}

// The weights of later outputs that a block of outputs fetches into the second-level cache, because the first-level cache
// can have only a few lines outstanding. Several blocks of rows fetch different outputs.
struct Fetch {
  std::int64_t distance;  // outputs ahead
  std::int64_t end;       // outputs from this one on are not fetched
  int first, every;       // outputs first, first + every, ... of a block are fetched
  bool from_front;        // output after output; otherwise a step of every output, then the next step
};

template <int kR, int kO>
inline const Vector kZeros[kR][kO] = {};

// to = from + steps of every row times those of every output. Sums are loaded and stored without a condition, because GCC
// keeps them in memory if two paths meet.
template <int kR, int kO, typename Product>
SPECDEC_INLINE void add_slice(const LinearWork& work, const float* inputs, std::int64_t output, Range steps, Fetch fetch,
                              const Vector (*from)[kO], Vector (*to)[kO]) {
  using Storage = typename Product::Storage;
  const std::int64_t row = work.args.in_features, left = row % Product::kStep;
  const Storage* weights = static_cast<const Storage*>(work.args.weight) + output * row;
  const bool has_tail = left > 0 && steps.end == work.plan.num_steps;
  Storage tail[kO][Product::kStep];  // the last step, which ends in zeros as the inputs do
  if (has_tail) {
    std::memset(tail, 0, sizeof(tail));
    for (int o = 0; o < kO; ++o) {
      std::memcpy(tail[o], weights + (o + 1) * row - left, static_cast<std::size_t>(left) * sizeof(Storage));
    }
  }
  Vector sums[kR][kO];
  for (int r = 0; r < kR; ++r) {
    for (int o = 0; o < kO; ++o) sums[r][o] = from[r][o];
  }
  inputs += steps.begin * kR * kLanes;
  const std::int64_t line_stride = fetch.from_front ? Product::kStep : row;
  const std::int64_t step_stride = fetch.from_front ? kO * Product::kStep : Product::kStep;
  const Storage* ahead = weights + fetch.distance * row + steps.begin * step_stride;
  const std::int64_t whole = has_tail ? steps.end - 1 : steps.end;
  for (std::int64_t step = steps.begin, end = whole; step < steps.end; end = steps.end) {
    const Storage* own = step < whole ? weights + step * Product::kStep : tail[0];
    const std::int64_t stride = step < whole ? row : Product::kStep;
    for (; step < end; ++step, own += Product::kStep, ahead += step_stride, inputs += kR * kLanes) {
      for (int o = fetch.first; o < kO; o += fetch.every) __builtin_prefetch(ahead + o * line_stride, 0, 2);
      Vector operands[kO];
      for (int o = 0; o < kO; ++o) operands[o] = Product::load(own + o * stride);
      for (int r = 0; r < kR; ++r) {
        Vector input = load_vector(inputs + r * kLanes);
#if SPECDEC_LANES == 16
        asm("" : "+v"(input));  // in a register: GCC would load it for every output, but a cycle has one load
#endif
        for (int o = 0; o < kO; ++o) sums[r][o] = Product::Units::add(sums[r][o], input, operands[o]);
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int o = 0; o < kO; ++o) to[r][o] = sums[r][o];
  }
}

// The sums of a block's outputs between two slices: those of the chunks before, and those of this chunk.
template <int kR, int kO>
struct Sums {
  Vector before[kR][kO], own[kR][kO];
};

// Adds a slice of one block of rows to outputs [output, output + kO). After the last slice, it writes their totals.
template <int kR, int kO, bool kSingle, typename Product>
SPECDEC_INLINE void block(const LinearWork& work, const float* inputs, std::int64_t output, Range steps, Fetch fetch,
                          Sums<kR, kO>& sums, float* totals) {
  if (output + fetch.distance >= fetch.end) fetch.first = kO;
  if constexpr (kSingle) {
    Vector only[kR][kO];
    add_slice<kR, kO, Product>(work, inputs, output, steps, fetch, kZeros<kR, kO>, only);
    store_totals<kR, kO>(only, totals);
  } else {
    const bool starts = steps.begin % kChunkSteps == 0, is_last = steps.end == work.plan.num_steps;
    const bool is_first_chunk = steps.end <= kChunkSteps, ends = is_last || steps.end % kChunkSteps == 0;
    add_slice<kR, kO, Product>(work, inputs, output, steps, fetch, starts ? kZeros<kR, kO> : sums.own,
                               is_first_chunk && ends ? sums.before : sums.own);
    for (int r = 0; r < kR && ends && !is_first_chunk; ++r) {
      for (int o = 0; o < kO; ++o) sums.before[r][o] += sums.own[r][o];
    }
    if (is_last) store_totals<kR, kO>(sums.before, totals);
  }
}

// Computes outputs [outputs.begin, outputs.end) of one block of rows. kSingle: all steps are one slice.
template <int kR, bool kSingle, typename Format, typename Product>
void group(const LinearWork& work, std::int64_t index, Range outputs, Fetch fetch) {
  constexpr int kO = outputs_of(kR);
  constexpr std::int64_t kWidth = (kSingle ? kPanel : std::min<std::int64_t>(kPanel, kGranule)) / kO * kO;
  const std::int64_t num_steps = work.plan.num_steps;
  const float* inputs = reinterpret_cast<const float*>(work.prepared(index));
  Sums<kR, kO> sums[kSingle ? 1 : kWidth / kO];
  Sums<kR, 1> last_sums[kSingle ? 1 : kO];  // of outputs that are fewer than kO
  for (std::int64_t first = outputs.begin; first < outputs.end; first += kWidth) {
    const std::int64_t count = std::min(kWidth, outputs.end - first);
    Vector totals[kTileRows][kBlocks];
    float* to = reinterpret_cast<float*>(totals);
    for (std::int64_t step = 0, end; step < num_steps; step = end) {
      end = kSingle ? num_steps : slice_end(step, num_steps, most_steps(kR));
      std::int64_t o = 0;
      for (; o + kO <= count; o += kO) {
        block<kR, kO, kSingle, Product>(work, inputs, first + o, {step, end}, fetch, sums[kSingle ? 0 : o / kO], to + o);
      }
      for (int i = 0; o < count; ++o, ++i) {
        block<kR, 1, kSingle, Product>(work, inputs, first + o, {step, end}, fetch, last_sums[kSingle ? 0 : i], to + o);
      }
    }
    store_tile<Format>(work.args, totals, work.row_of(index), kR, first, count);
  }
}

// Outputs of a single row that are computed at once where vectors have 16 lanes. With one, the weights are read from front
// to back, as processors fetch memory fastest on their own. If a vector's operands are half a line of weights (fp16), the
// sum of the product before would come too late: then there are two outputs, and their weights are prefetched.
template <typename Product>
constexpr int kInOrder = Product::kStep * sizeof(typename Product::Storage) == sizeof(Vector) ? 1 : 2;

constexpr std::int64_t kPairDistance = 1 << 14;  // bytes between the weights of two outputs and those that are fetched

// With so few bytes of weights, a layer is taken to find them in a cache. Reading one output after another gains nothing
// there, and several outputs' products do not wait for one another.
constexpr std::int64_t kCachedBytes = 1 << 19;

// Writes the totals of outputs [output, output + kO) of a single row.
template <int kO, typename Product>
SPECDEC_INLINE void outputs_at_once(const LinearWork& work, const float* inputs, std::int64_t output, Fetch fetch,
                                    float* totals) {
  const std::int64_t num_steps = work.plan.num_steps;
  Vector sums[1][kO] = {};
  for (std::int64_t step = 0; step < num_steps; step += kChunkSteps) {
    Vector chunk[1][kO];
    const Range steps = {step, std::min(num_steps, step + kChunkSteps)};
    add_slice<1, kO, Product>(work, inputs, output, steps, fetch, kZeros<1, kO>, chunk);
    for (int o = 0; o < kO; ++o) sums[0][o] = step == 0 ? chunk[0][o] : sums[0][o] + chunk[0][o];
  }
  store_totals<1, kO>(sums, totals);
}

// Computes outputs [outputs.begin, outputs.end) of a single row in order.
template <typename Format, typename Product>
void outputs_in_order(const LinearWork& work, std::int64_t index, Range outputs) {
  constexpr int kOrdered = kInOrder<Product>, kCached = outputs_of(1);
  const float* inputs = reinterpret_cast<const float*>(work.prepared(index));
  const std::int64_t row_bytes = work.args.in_features * static_cast<std::int64_t>(sizeof(typename Format::Storage));
  const bool cached = work.args.out_features * row_bytes <= kCachedBytes && work.plan.num_steps <= kChunkSteps;
  const std::int64_t distance = std::max<std::int64_t>(kOrdered, kPairDistance / row_bytes);
  for (std::int64_t first = outputs.begin; first < outputs.end; first += kPanel) {
    const std::int64_t count = std::min<std::int64_t>(kPanel, outputs.end - first);
    Vector totals[kTileRows][kBlocks];
    float* to = reinterpret_cast<float*>(totals);
    std::int64_t o = 0;
    for (; cached && o + kCached <= count; o += kCached) {
      Vector sums[1][kCached];
      add_slice<1, kCached, Product>(work, inputs, first + o, {0, work.plan.num_steps}, Fetch{0, 0, kCached, 1, false},
                                     kZeros<1, kCached>, sums);
      store_totals<1, kCached>(sums, to + o);
    }
    for (; kOrdered > 1 && o + kOrdered <= count; o += kOrdered) {
      const int fetched = first + o + distance < outputs.end ? 0 : kOrdered;
      outputs_at_once<kOrdered, Product>(work, inputs, first + o, Fetch{distance, 0, fetched, 1, true}, to + o);
    }
    for (; o < count; ++o) outputs_at_once<1, Product>(work, inputs, first + o, Fetch{0, 0, 1, 1, false}, to + o);
    store_tile<Format>(work.args, totals, work.row_of(index), 1, first, count);
  }
}

template <bool kSingle, typename Format, typename Product, int... kBelow>
auto group_of(std::int64_t count, std::integer_sequence<int, kBelow...>) {
  static constexpr decltype(&group<1, kSingle, Format, Product>) kGroups[] = {group<kBelow + 1, kSingle, Format, Product>...};
  return kGroups[count - 1];
}

// Prepares the inputs of a block of rows as vectors, step after step. So they are one stream, and no few cache sets hold
// them all.
template <typename Product>
void prepare_rows(const LinearWork& work, std::int64_t index) {
  const LinearArgs& args = work.args;
  const auto* rows = static_cast<const typename Product::Storage*>(args.rows);
  const std::int64_t num_whole = args.in_features / Product::kStep, count = work.rows_of(index);
  auto* inputs = reinterpret_cast<float*>(work.prepared(index));
  for (std::int64_t row = 0; row < count; ++row, inputs += kLanes) {
    const auto* from = rows + (work.row_of(index) + row) * args.row_stride;
    for (std::int64_t step = 0; step < work.plan.num_steps; ++step) {
      const std::int64_t first = step * Product::kStep;
      const Vector units = step < num_whole ? Product::load(from + first)
                                            : load_some<Product>(from + first, args.in_features - first);
      std::memcpy(inputs + step * count * kLanes, &units, sizeof(units));
    }
  }
}

template <typename Format, typename Product>
void row_outputs(const LinearWork& work, Range blocks, Range outputs, void*) {
  if constexpr (kLanes == 16) {
    if (work.num_rows == 1) return outputs_in_order<Format, Product>(work, blocks.begin, outputs);
  }
  constexpr auto kCounts = std::make_integer_sequence<int, kMostRows>();
  const std::int64_t row_bytes = work.args.in_features * static_cast<std::int64_t>(sizeof(typename Format::Storage));
  const std::int64_t num_blocks = blocks.end - blocks.begin;
  const std::int64_t size = std::max(kGranule, kGroupBytes / row_bytes / kGranule * kGranule);
  const std::int64_t distance = num_blocks == 1 ? std::max<std::int64_t>(kGranule, kDistance / row_bytes) : size;
  const char* weights = static_cast<const char*>(work.args.weight);
  const char* end = weights + std::min(outputs.end, outputs.begin + distance) * row_bytes;
  for (const char* line = weights + outputs.begin * row_bytes; line < end; line += kLine) __builtin_prefetch(line, 0, 2);
  for (std::int64_t begin = outputs.begin; begin < outputs.end; begin += size) {
    const Range own = {begin, std::min(outputs.end, begin + size)};
    for (std::int64_t index = blocks.begin; index < blocks.end; ++index) {
      const int count = static_cast<int>(work.rows_of(index)), turn = static_cast<int>(index - blocks.begin);
      const bool is_single = work.plan.num_steps <= most_steps(count);
      // Outputs in short rows are fetched from front to back, as they lie in memory. It is slower with long rows, and with
      // several slices, which come back to the outputs.
      const bool from_front = is_single && num_blocks == 1 && row_bytes <= kPageBytes;
      (is_single ? group_of<true, Format, Product>(count, kCounts) : group_of<false, Format, Product>(count, kCounts))(
          work, index, own, Fetch{distance, outputs.end, turn, static_cast<int>(num_blocks), from_front});
    }
  }
}
