// Rows of bf16 on tiles: quantized_kernel.h includes this file after quantized_tiles.h.
//
// Values of codes are exact in bf16. Vectors add the same products in the same order (quantized_kernel.h) and are faster for
// few rows; they have the same bits if they take subnormal numbers for zeros too.

constexpr std::int64_t kHalfBlock = 32;  // inputs of a tile's row

bool takes_halves(const PackedWeight& weight, DType dtype) {
  if (dtype != DType::kBFloat16 || weight.block_size != kHalfBlock) return false;
  const auto is_exact = [](float x) { return BFloat16::load(BFloat16::store(x)) == x; };
  return weight.kind != CodeKind::kTable || std::all_of(weight.table, weight.table + 16, is_exact);
}

// The values of two neighbouring inputs of a word, as bf16: the first in the low half.
template <int kInput, typename Codes>
SPECDEC_INLINE Words pair_of(const Codes& codes, Words word) {
  const Words low = reinterpret_cast<Words>(codes.template values<code_of<Codes>(kInput)>(word));
  const Words high = reinterpret_cast<Words>(codes.template values<code_of<Codes>(kInput + 1)>(word));
  return (low >> 16) | (high & 0xffff0000u);
}

#if SPECDEC_LANES == 16
// The same by one look-up for both. It reads five bits of each half, and has every entry twice, so it needs no mask.
struct HalfTable {
  static constexpr int kCodes = TableCodes::kCodes;
  static constexpr int input_of(int n) { return TableCodes::input_of(n); }
  explicit HalfTable(const PackedWeight& weight) {
    for (int i = 0; i < 32; ++i) entries[i] = BFloat16::store(weight.table[i % 16]);
    table = _mm512_loadu_si512(entries);
  }
  std::uint16_t entries[32];
  __m512i table;
};

template <int kInput>
SPECDEC_INLINE Words pair_of(const HalfTable& codes, Words word) {
  constexpr int kLow = 4 * code_of<HalfTable>(kInput), kHigh = 4 * code_of<HalfTable>(kInput + 1);
  const Words low = word >> kLow, high = kHigh < 16 ? word << (16 - kHigh) : word >> (kHigh - 16);
  const __m512i index = _mm512_mask_blend_epi16(0xaaaaaaaau, reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high));
  return reinterpret_cast<Words>(_mm512_permutexvar_epi16(index, codes.table));
}
#else
using HalfTable = TableCodes;
#endif

template <typename Codes, int... kPair>
SPECDEC_INLINE void unpack_word(const Codes& codes, Words word, std::uint32_t* to, std::integer_sequence<int, kPair...>) {
  const auto unpack = [&](auto pair) {
    constexpr int kInput = 2 * decltype(pair)::value;
    store_as(to + decltype(pair)::value * kPanelOutputs, pair_of<kInput>(codes, word));
  };
  (unpack(std::integral_constant<int, kPair>()), ...);
}

// A block of a panel as pairs of bf16, 16 pairs of 16 outputs.
template <typename Codes>
SPECDEC_INLINE void unpack_block(const Codes& codes, const std::uint32_t* from, std::int64_t words, std::uint32_t* to) {
  constexpr int kPairs = Codes::kCodes / 2;
  for (std::int64_t w = 0; w < words; ++w) {
    for (int v = 0; v < kPanelVectors; ++v) {
      unpack_word(codes, load_as<Words>(from + w * kPanelOutputs + v * kLanes), to + w * kPairs * kPanelOutputs + v * kLanes,
                  std::make_integer_sequence<int, kPairs>());
    }
  }
}

// Rows of bf16 times values of codes as pairs of bf16.
template <typename Tiles, typename Codes>
struct HalfProduct {
  using Sum = float;
  static constexpr bool kHasSteps = false;
  static constexpr std::int64_t kUnpackedWords = kHalfBlock / 2 * kPanelOutputs;  // of a block
  static constexpr std::int64_t input_bytes = kTileHeight * kHalfBlock * 2, weight_bytes = 4 * kUnpackedWords;

  HalfProduct(const PackedWeight& weight, std::int64_t num_rows) : codes(weight), words(weight.words()) {
    tiles.configure(kPanelOutputs, std::min<std::int64_t>(kTileHeight, num_rows));
  }
  ~HalfProduct() { tiles.release(); }

  const void* unpacked(const std::uint32_t* from, std::int64_t num_blocks, std::uint32_t* to) const {
    for (std::int64_t b = 0; b < num_blocks; ++b) unpack_block(codes, from + b * words * kPanelOutputs, words, to + b * kUnpackedWords);
    return to;
  }

  template <int kTile>
  SPECDEC_INLINE void multiply(const char* inputs, const char* weights, TileSums<float>& sums) {
    constexpr int kInputs = 4 + kTile % 2, kWeights = 6 + kTile % 2;
    tiles.template zero<kTile>();
    tiles.template load<kInputs>(inputs, kHalfBlock * 2);
    tiles.template load<kWeights>(weights, kTileRowBytes);
    tiles.template multiply_add<kTile, kInputs, kWeights>();
    tiles.template store<kTile>(sums, kTileRowBytes);
  }

  SPECDEC_INLINE static Vector load(const float* sums) { return load_vector(sums); }

  const Codes codes;
  const std::int64_t words;
  Tiles tiles;
};

template <typename Codes>
void multiply_halves_with(const QuantizedTask& task) {
  HalfProduct<SPECDEC_TILES, Codes> product(*task.weight, task.num_rows);
  multiply_on_tiles(task, product, task.rows->halves);
}

#ifdef SPECDEC_INTEGER_TILES
// Lets this thread take subnormal numbers for zeros, as tiles do.
class FlushToZero {
 public:
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlush = 0x8040;  // FTZ, DAZ
  unsigned before_;
};

void multiply_flushed(const QuantizedTask& task) {
  const FlushToZero flush;
  multiply(task);
}
#else
struct FlushToZero {};
#endif

void multiply_halves(const QuantizedTask& task) {
  [[maybe_unused]] const FlushToZero flush;
  if (task.weight->kind == CodeKind::kInt8) return multiply_halves_with<Int8Codes>(task);
  if (task.weight->kind == CodeKind::kFloat8) return multiply_halves_with<Float8Codes>(task);
  multiply_halves_with<HalfTable>(task);
}
