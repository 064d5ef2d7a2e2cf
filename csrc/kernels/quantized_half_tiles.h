// Rows of bf16 on tiles: quantized_kernel.h includes this file where SPECDEC_TILES names a class of amx_tiles.h.
//
// Values of codes are exact in bf16, so a tile instruction multiplies 16 rows with a block of a panel, as linear_tiles.h does
// with plain weights; its sums are scaled in fp32, block after block. Vectors add the same products in the same order
// (quantized_kernel.h) and are faster for few rows; they have the same bits if they take subnormal numbers for zeros too.

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

// Rows and panels that are multiplied at a time: the four tiles of sums.
constexpr std::int64_t kTileRowsAtOnce = 2 * kTileHeight;

using HalfSums = float[kTileHeight][kPanelOutputs];

// The sums of a block: of `two_rows` the second 16 rows as well, of `two_panels` the second panel.
template <typename Tiles>
SPECDEC_INLINE void multiply_block(Tiles& tiles, const std::uint16_t* rows, bool two_rows, bool two_panels, HalfSums (&sums)[2][2]) {
  constexpr std::int64_t kRowBytes = kHalfBlock * 2;
  tiles.template load<4>(rows, kRowBytes);
  tiles.template zero<0>();
  tiles.template multiply_add<0, 4, 6>();
  tiles.template store<0>(sums[0][0], kTileRowBytes);
  if (two_panels) {
    tiles.template zero<1>();
    tiles.template multiply_add<1, 4, 7>();
    tiles.template store<1>(sums[0][1], kTileRowBytes);
  }
  if (!two_rows) return;
  tiles.template load<5>(rows + kTileHeight * kHalfBlock, kRowBytes);
  tiles.template zero<2>();
  tiles.template multiply_add<2, 5, 6>();
  tiles.template store<2>(sums[1][0], kTileRowBytes);
  if (two_panels) {
    tiles.template zero<3>();
    tiles.template multiply_add<3, 5, 7>();
    tiles.template store<3>(sums[1][1], kTileRowBytes);
  }
}

template <typename Tiles, typename Codes>
void multiply_halves_with(const QuantizedTask& task) {
  const PackedWeight& weight = *task.weight;
  const PreparedRows& rows = *task.rows;
  const Codes codes(weight);
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  const float* mins = weight.mins == nullptr ? nullptr : task.scales + task.num_panels * kScaleBlocks * kPanelOutputs;
  std::memset(task.totals, 0, sizeof(float) * static_cast<std::size_t>(task.num_rows * task.num_panels * kPanelOutputs));
  Tiles tiles;
  tiles.configure(kPanelOutputs, std::min<std::int64_t>(kTileHeight, task.num_rows));
  alignas(64) std::uint32_t values[2][kHalfBlock / 2 * kPanelOutputs];
  alignas(64) HalfSums sums[2][2];
  for (std::int64_t first = 0; first < num_blocks; first += kScaleBlocks) {
    const Blocks blocks = {first, std::min(num_blocks, first + kScaleBlocks)};
    convert_scales(task, blocks);
    for (std::int64_t panel = 0; panel < task.num_panels; panel += 2) {
      const std::int64_t count = std::min<std::int64_t>(2, task.num_panels - panel);
      const std::uint32_t* from = weight.codes + ((task.first_panel + panel) * num_blocks + first) * block_words;
      for (std::int64_t block = blocks.first; block < blocks.last; ++block, from += block_words) {
        for (std::int64_t p = 0; p < count; ++p) {
          unpack_block(codes, from + p * num_blocks * block_words, weight.words(), values[p]);
        }
        tiles.template load<6>(values[0], kTileRowBytes);
        if (count > 1) tiles.template load<7>(values[1], kTileRowBytes);
        const std::int64_t of_block = block * rows.most_rows + task.first_row;
        for (std::int64_t row = 0; row < task.num_rows; row += kTileRowsAtOnce) {
          const std::int64_t own = std::min(kTileRowsAtOnce, task.num_rows - row);
          multiply_block(tiles, rows.halves + (of_block + row) * kHalfBlock, own > kTileHeight, count > 1, sums);
          for (std::int64_t p = 0; p < count; ++p) {
            const std::int64_t at = ((panel + p) * kScaleBlocks + block - first) * kPanelOutputs;
            for (int v = 0; v < kPanelVectors; ++v) {
              const Vector scale = load_vector(task.scales + at + v * kLanes);
              const Vector minimum = mins == nullptr ? Vector{} : load_vector(mins + at + v * kLanes);
              float* to = task.totals + (row * task.num_panels + panel + p) * kPanelOutputs + v * kLanes;
              for (std::int64_t r = 0; r < own; ++r, to += task.num_panels * kPanelOutputs) {
                const float* sum = sums[r / kTileHeight][p][r % kTileHeight] + v * kLanes;
                Vector total = load_vector(to) + scale * load_vector(sum);
                if (mins != nullptr) total += minimum * rows.sums[of_block + row + r];
                store_as(to, total);
              }
            }
          }
        }
      }
    }
  }
  tiles.release();
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
  if (task.weight->kind == CodeKind::kInt8) return multiply_halves_with<SPECDEC_TILES, Int8Codes>(task);
  if (task.weight->kind == CodeKind::kFloat8) return multiply_halves_with<SPECDEC_TILES, Float8Codes>(task);
  multiply_halves_with<SPECDEC_TILES, HalfTable>(task);
}
