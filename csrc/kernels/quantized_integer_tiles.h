// Rows of whole numbers on tiles: quantized_kernel.h includes this file after quantized_tiles.h, where a machine may have AMX.
//
// The sums over a block are exact integers, and what follows is that of quantized_whole.h in the same order.

template <typename Codes>
class IntegerProduct {
 public:
  using Sum = std::int32_t;
  static constexpr bool kHasSteps = true;
  static constexpr std::int64_t kUnpackedWords = 8 * kPanelOutputs;  // of a block of 32
  const std::int64_t input_bytes, weight_bytes;

  IntegerProduct(const PackedWeight& weight, std::int64_t num_rows)
      : input_bytes(kTileHeight * weight.block_size), weight_bytes(kPanelOutputs * weight.block_size), codes_(weight), words_(weight.words()) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool has_inputs = tile == 4 || tile == 5;
      config.row_bytes[tile] = static_cast<std::uint16_t>(has_inputs ? weight.block_size : kTileRowBytes);
      config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? std::min<std::int64_t>(kTileHeight, num_rows) : weight.block_size / 4);
    }
    config.load();
  }
  ~IntegerProduct() { TileConfig::release(); }

  // Four inputs of 16 outputs in 64 bytes; those of 8-bit codes lie in memory as they are.
  const void* unpacked(const std::uint32_t* from, std::int64_t num_blocks, std::uint32_t* to) const {
    if constexpr (Codes::kPerWord == 1) {
      return from;
    } else {
      for (std::int64_t w = 0; w < num_blocks * words_; ++w) {
        const Words word = load_as<Words>(from + w * kPanelOutputs);
        store_as(to + 2 * w * kPanelOutputs, codes_.template bytes<0>(word));
        store_as(to + (2 * w + 1) * kPanelOutputs, codes_.template bytes<1>(word));
      }
      return to;
    }
  }

  template <int kTile>
  SPECDEC_INLINE void multiply(const char* inputs, const char* weights, TileSums<std::int32_t>& sums) {
    constexpr int kInputs = 4 + kTile % 2, kWeights = 6 + kTile % 2;
    constexpr std::int64_t kStride = kTileRowBytes;
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(inputs), "r"(input_bytes / kTileHeight), "i"(kInputs) : "memory");
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(weights), "r"(kStride), "i"(kWeights) : "memory");
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTile), "i"(kInputs), "i"(kWeights));
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(&sums), "r"(kStride), "i"(kTile) : "memory");
  }

  SPECDEC_INLINE static Vector load(const std::int32_t* sums) {
    return __builtin_convertvector(load_as<Integers>(sums), Vector);
  }

 private:
  const Codes codes_;
  const std::int64_t words_;
};

template <typename Codes>
void multiply_whole_on_tiles_with(const QuantizedTask& task) {
  IntegerProduct<Codes> product(*task.weight, task.num_rows);
  multiply_on_tiles(task, product, task.rows->whole);
}

void multiply_whole_on_tiles(const QuantizedTask& task) {
  if (task.weight->kind == CodeKind::kInt8) return multiply_whole_on_tiles_with<WholeInt8>(task);
  multiply_whole_on_tiles_with<WholeTable>(task);
}
