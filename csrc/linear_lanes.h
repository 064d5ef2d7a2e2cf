// The same sums with an output in every lane, for many rows of few inputs: included by linear_kernel.h, once per
// instruction set.
//
// With its lanes along the inputs an output costs a dozen instructions to add up its lanes, more than its products where
// inputs are few. Here the weights of kLanes outputs are transposed into a buffer, which all rows then use, and the sums
// that were lanes are vectors of their own: the products of a sum, their order and the pairs in which sums are added are
// those of linear_kernel.h, so no bit changes.

constexpr int kBlocks = 2;                           // of kLanes outputs, which share an input's broadcast
constexpr std::int64_t kMostLaneInputs = kChunk;     // beyond, a block of rows would leave the first-level cache
constexpr std::int64_t kLaneInputsPerRow = 24;       // transposing pays with more rows than inputs over this

typedef std::int32_t LaneIndex __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
typedef std::uint32_t LaneBits __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));

// Lane j of one vector, or of the other the lane kHalf before or after: a step of a transposition.
template <int kHalf>
SPECDEC_INLINE void exchange(Vector& a, Vector& b) {
  LaneIndex low, high;
  for (int j = 0; j < kLanes; ++j) {
    low[j] = (j & kHalf) == 0 ? j : kLanes + j - kHalf;
    high[j] = (j & kHalf) == 0 ? j + kHalf : kLanes + j;
  }
  const Vector first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}

template <int kHalf>
SPECDEC_INLINE void transpose(Vector square[kLanes]) {
  if constexpr (kHalf < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kHalf) == 0) exchange<kHalf>(square[i], square[i + kHalf]);
    }
    transpose<2 * kHalf>(square);
  }
}

// Vectors from one lane's steps to the next's: odd, because at a power of two they would compete for a few cache sets.
SPECDEC_INLINE std::int64_t lane_stride(std::int64_t num_steps) { return num_steps | 1; }

// Weights of kLanes outputs: vector (l, s) holds for each output what lane l of its step s would hold.
template <typename Product>
SPECDEC_INLINE void pack(const typename Product::Weight* weights, std::int64_t in_features, std::int64_t num_steps,
                         Vector* packed) {
  const std::int64_t stride = lane_stride(num_steps);
  for (std::int64_t step = 0; step < num_steps; ++step) {
    Vector square[kLanes];
    const std::int64_t first = step * Product::kStep;
    for (int o = 0; o < kLanes; ++o) {
      const auto* from = weights + o * in_features + first;
      typename Product::Weight last[Product::kStep] = {};
      if (first + Product::kStep > in_features) {
        std::memcpy(last, from, static_cast<std::size_t>(in_features - first) * sizeof(last[0]));
        from = last;
      }
      square[o] = reinterpret_cast<Vector>(Product::weights(from));
    }
    transpose<1>(square);
    for (int l = 0; l < kLanes; ++l) packed[l * stride + step] = square[l];
  }
}

// In the order of fold and sums_of.
SPECDEC_INLINE Vector folded(Vector sums[kLanes]) {
  for (int half = kLanes / 2; half >= 4; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Format::store (dtype.h) of every lane, in the lower halves: a loop over lanes is unrolled before it is vectorised.
template <typename Format>
SPECDEC_INLINE LaneBits stored(LaneBits bits);

template <>
SPECDEC_INLINE LaneBits stored<BFloat16>(LaneBits bits) {
  const LaneBits nan = reinterpret_cast<LaneBits>((bits & 0x7fffffffu) > 0x7f800000u);
  return ((nan & (bits | 0x400000u)) | (~nan & (bits + 0x7fffu + ((bits >> 16) & 1u)))) >> 16;
}

template <>
SPECDEC_INLINE LaneBits stored<Float16>(LaneBits bits) {
  const LaneBits m = bits & 0x7fffffffu;
  const LaneBits nan = reinterpret_cast<LaneBits>(m > 0x7f800000u);
  const LaneBits large = reinterpret_cast<LaneBits>(m >= 0x477ff000u);  // rounds to infinity, or is a NaN
  const LaneBits small = reinterpret_cast<LaneBits>(m < 0x38800000u);   // subnormal
  const LaneBits rounded = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  const LaneBits subnormal = reinterpret_cast<LaneBits>(reinterpret_cast<Vector>(m) + 0.5f) - 0x3f000000u;
  const LaneBits special = 0x7c00u | (nan & 0x200u);
  return ((bits >> 16) & 0x8000u) | (large & special) | (small & subnormal) | (~(large | small) & rounded);
}

template <typename Format>
SPECDEC_INLINE void store_lanes(Vector values, typename Format::Storage* out) {
  if constexpr (std::is_same_v<typename Format::Storage, float>) {
    std::memcpy(out, &values, sizeof(values));
  } else {
    typedef std::uint16_t Halves __attribute__((vector_size(kLanes * sizeof(std::uint16_t))));
    const Halves halves = __builtin_convertvector(stored<Format>(reinterpret_cast<LaneBits>(values)), Halves);
    std::memcpy(out, &halves, sizeof(halves));
  }
}

// sums[r][o] += one lane's inputs of row r times its weights of block o.
template <int kR, int kO, typename Product>
SPECDEC_INLINE void add_step(const typename Product::Input* inputs, std::int64_t input_stride, const Vector* packed,
                             std::int64_t block_stride, Vector sums[kR][kO]) {
  Vector weights[kO];
  for (int o = 0; o < kO; ++o) weights[o] = packed[o * block_stride];
  for (int r = 0; r < kR; ++r) {
    const auto input = Product::broadcast(inputs + r * input_stride);
    for (int o = 0; o < kO; ++o) sums[r][o] = Product::add_lanes(sums[r][o], input, weights[o]);
  }
}

template <int kR, int kO, typename Format, typename Product>
SPECDEC_INLINE void lane_block(const LinearArgs& args, const typename Product::Input* inputs, std::int64_t padded,
                               const Vector* packed, std::int64_t row, std::int64_t output) {
  using Weight = typename Product::Weight;
  constexpr int kUnit = Product::kStep / kLanes;  // inputs per lane and step
  const std::int64_t num_steps = padded / Product::kStep, num_whole = args.in_features / Product::kStep;
  const std::int64_t stride = lane_stride(num_steps);
  Vector sums[kR][kO][kLanes];
  for (int l = 0; l < kLanes; ++l) {
    Vector chunk[kR][kO] = {}, last[kR][kO] = {};
    const auto* own_inputs = inputs + row * padded + l * kUnit;
    const Vector* own_weights = packed + l * stride;
    for (std::int64_t step = 0; step < num_whole; ++step) {
      add_step<kR, kO, Product>(own_inputs + step * Product::kStep, padded, own_weights + step, kLanes * stride, chunk);
    }
    if (num_whole < num_steps) {
      add_step<kR, kO, Product>(own_inputs + num_whole * Product::kStep, padded, own_weights + num_whole, kLanes * stride,
                                last);
    }
    for (int r = 0; r < kR; ++r) {
      for (int o = 0; o < kO; ++o) {
        sums[r][o][l] = Vector{} + chunk[r][o];
        if (num_whole < num_steps) sums[r][o][l] += last[r][o];
      }
    }
  }
  const Weight* bias = static_cast<const Weight*>(args.bias);
  for (int r = 0; r < kR; ++r) {
    for (int o = 0; o < kO; ++o) {
      const std::int64_t first = output + o * kLanes;
      Vector total = folded(sums[r][o]);
      if (bias != nullptr) {
        Vector added;
        for (int l = 0; l < kLanes; ++l) added[l] = Format::load(bias[first + l]);
        total += added;
      }
      store_lanes<Format>(total, static_cast<Weight*>(args.out) + (row + r) * args.out_features + first);
    }
  }
}

template <int kO, typename Format, typename Product>
SPECDEC_INLINE void lane_rows(const LinearArgs& args, const typename Product::Input* inputs, std::int64_t padded,
                              const Vector* packed, std::int64_t row, std::int64_t count, std::int64_t output) {
  switch (count) {
    case 1: return lane_block<1, kO, Format, Product>(args, inputs, padded, packed, row, output);
    case 2: return lane_block<2, kO, Format, Product>(args, inputs, padded, packed, row, output);
#if SPECDEC_LANES == 16
    case 3: return lane_block<3, kO, Format, Product>(args, inputs, padded, packed, row, output);
    case 4: return lane_block<4, kO, Format, Product>(args, inputs, padded, packed, row, output);
    case 5: return lane_block<5, kO, Format, Product>(args, inputs, padded, packed, row, output);
    case 6: return lane_block<6, kO, Format, Product>(args, inputs, padded, packed, row, output);
#endif
  }
}

// Bytes of the buffer for transposed weights; 0 where transposing does not pay.
template <typename Product>
std::int64_t lane_bytes(const LinearArgs& args, std::int64_t padded) {
  constexpr std::int64_t kLeastRows = Product::kStep > kLanes ? 4 : 12;  // pairs take half as many steps to transpose
  const bool pays = args.in_features <= kMostLaneInputs && args.num_rows >= kLeastRows &&
                    args.num_rows * kLaneInputsPerRow >= args.in_features && args.out_features >= kLanes;
  return pays ? kBlocks * kLanes * lane_stride(padded / Product::kStep) * static_cast<std::int64_t>(sizeof(Vector)) : 0;
}

// As many outputs from `begin` on as fill blocks, of all rows; returns the first one that is left over. `buffer` is aligned
// to a vector.
template <typename Format, typename Product>
std::int64_t lane_outputs(const LinearArgs& args, const void* prepared, std::int64_t padded, std::int64_t begin,
                          std::int64_t end, void* buffer) {
  const auto* inputs = static_cast<const typename Product::Input*>(prepared);
  const auto* weights = static_cast<const typename Product::Weight*>(args.weight);
  Vector* packed = static_cast<Vector*>(buffer);
  const std::int64_t num_steps = padded / Product::kStep, rows = block_rows(args.num_rows);
  std::int64_t output = begin;
  while (output + kLanes <= end) {
    const int blocks = output + kBlocks * kLanes <= end ? kBlocks : 1;
    for (int o = 0; o < blocks; ++o) {
      pack<Product>(weights + (output + o * kLanes) * args.in_features, args.in_features, num_steps,
                    packed + o * kLanes * lane_stride(num_steps));
    }
    for (std::int64_t row = 0; row < args.num_rows; row += rows) {
      const std::int64_t count = std::min(rows, args.num_rows - row);
      if (blocks == kBlocks) {
        lane_rows<kBlocks, Format, Product>(args, inputs, padded, packed, row, count, output);
      } else {
        lane_rows<1, Format, Product>(args, inputs, padded, packed, row, count, output);
      }
    }
    output += blocks * kLanes;
  }
  return output;
}
