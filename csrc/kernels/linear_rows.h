// Few rows, multiplied with the weights in place, with lanes along the inputs. linear_kernel.h includes this file, once per
// instruction set.
//
// Up to kMostRows rows are one block. If there are several blocks, the weights of a group of outputs stay in the
// second-level cache while all blocks are multiplied with them.

constexpr int kMostRows = SPECDEC_LANES == 16 ? 8 : 2;
constexpr std::int64_t kGranule = 12;          // outputs; a multiple of outputs_of every number of rows
constexpr std::int64_t kGroupBytes = 1 << 18;  // weights of a group: a quarter of a second-level cache
constexpr std::int64_t kDistance = 1 << 16;    // bytes between the weights that are multiplied and those that are fetched

// Rows of a block: more than six only if their inputs, `row_bytes` each, hardly exceed the first-level cache.
constexpr int most_rows(std::int64_t row_bytes) { return kMostRows * row_bytes <= 48 * 1024 ? kMostRows : std::min(6, kMostRows); }

// Outputs that a block of `rows` rows computes at once: as many sums as there are registers.
constexpr int outputs_of(int rows) { return rows <= 6 ? 4 : 3; }

typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef std::int32_t QuadIndex __attribute__((vector_size(4 * sizeof(std::int32_t))));

// Adds the upper half of the lanes to the lower half, until four lanes are left.
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

// The weights of later outputs that a block of outputs fetches into the second-level cache, because the first-level cache
// can have only a few lines outstanding. Several blocks of rows fetch different outputs.
struct Fetch {
  std::int64_t distance;  // outputs ahead
  int first, every;       // outputs first, first + every, ... of a block are fetched
};

// sums[r][o] += steps [first, last) of row r times those of output o. If `tail` is not null, it holds the weights of the
// last step, one step for each output.
template <int kR, int kO, typename Product>
SPECDEC_INLINE void add_chunk(const float* inputs, std::int64_t input_stride, const typename Product::Storage* weights,
                              std::int64_t weight_stride, const typename Product::Storage* tail, std::int64_t first,
                              std::int64_t last, Fetch fetch, Vector sums[kR][kO]) {
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
    for (int o = fetch.first; o < kO; o += fetch.every) __builtin_prefetch(from + (fetch.distance + o) * weight_stride, 0, 2);
    add_step(from, weight_stride, step);
  }
  if (tail != nullptr) add_step(tail, Product::kStep, whole);
}

// Adds the lanes and the bias, and writes outputs [output, output + kO) of prepared rows [row, row + kR).
template <int kR, int kO, typename Format>
SPECDEC_INLINE void store_block(const LinearWork& work, std::int64_t row, std::int64_t output, const Vector sums[kR][kO]) {
  using Storage = typename Format::Storage;
  const LinearArgs& args = work.args;
  const Storage* bias = static_cast<const Storage*>(args.bias);
  for (int r = 0; r < kR; ++r) {
    Storage* out = static_cast<Storage*>(args.out) + (work.first_row + row + r) * args.out_features + output;
    Quad folded[4] = {};
    for (int o = 0; o < kO; ++o) folded[o] = fold(sums[r][o]);
    Quad total = sums_of(folded[0], folded[1], folded[2], folded[3]);
    if (bias != nullptr) {
      for (int o = 0; o < kO; ++o) total[o] += Format::load(bias[output + o]);
    }
    for (int o = 0; o < kO; ++o) out[o] = Format::store(total[o]);
  }
}

// Computes outputs [output, output + kO) of prepared rows [row, row + kR).
template <int kR, int kO, typename Format, typename Product>
SPECDEC_INLINE void block(const LinearWork& work, std::int64_t row, std::int64_t output, Fetch fetch) {
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
                               first, last, fetch, chunk);
    for (int r = 0; r < kR; ++r) {
      for (int o = 0; o < kO; ++o) sums[r][o] = first == 0 ? chunk[r][o] : sums[r][o] + chunk[r][o];
    }
  }
  store_block<kR, kO, Format>(work, row, output, sums);
}

// Computes outputs [outputs.begin, outputs.end) of one block of rows.
template <int kR, typename Format, typename Product>
void group(const LinearWork& work, std::int64_t row, Range outputs, Fetch fetch) {
  constexpr int kO = outputs_of(kR);
  std::int64_t output = outputs.begin;
  for (; output + kO <= outputs.end; output += kO) block<kR, kO, Format, Product>(work, row, output, fetch);
  for (; output < outputs.end; ++output) block<kR, 1, Format, Product>(work, row, output, Fetch{0, 1, 1});
}

template <typename Format, typename Product, int... kBelow>
auto group_of(std::int64_t count, std::integer_sequence<int, kBelow...>) {
  static constexpr decltype(&group<1, Format, Product>) kGroups[] = {group<kBelow + 1, Format, Product>...};
  return kGroups[count - 1];
}

// Prepares the inputs of a block of rows as vectors, row after row.
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
void row_outputs(const LinearWork& work, Range blocks, Range outputs, void*) {
  const std::int64_t row_bytes = work.args.in_features * static_cast<std::int64_t>(sizeof(typename Format::Storage));
  const std::int64_t num_blocks = blocks.end - blocks.begin;
  const std::int64_t size = std::max(kGranule, kGroupBytes / row_bytes / kGranule * kGranule);
  const std::int64_t distance = num_blocks == 1 ? std::max<std::int64_t>(kGranule, kDistance / row_bytes) : size;
  for (std::int64_t begin = outputs.begin; begin < outputs.end; begin += size) {
    const Range own = {begin, std::min(outputs.end, begin + size)};
    const bool is_last = own.end == outputs.end;  // this thread computes no outputs after these
    for (std::int64_t index = blocks.begin; index < blocks.end; ++index) {
      const int turn = static_cast<int>(index - blocks.begin);
      const Fetch fetch = {distance, is_last ? kMostRows : turn, static_cast<int>(num_blocks)};
      group_of<Format, Product>(work.rows_of(index), std::make_integer_sequence<int, kMostRows>())(
          work, index * work.plan.height, own, fetch);
    }
  }
}
