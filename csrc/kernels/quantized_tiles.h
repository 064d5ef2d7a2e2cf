// Rows of whole numbers on tiles: quantized_kernel.h includes this file where a machine may have AMX.
//
// A tile multiplies 16 rows with the block of a panel: 16 x 16 sums over a block's inputs. Sums are exact, and what follows is
// that of quantized_whole.h in the same order, so a row has the same bits there and here.

constexpr std::int64_t kTilesOfRows = 3;  // whose sums are computed with one load of the weights
static_assert(kTilesOfRows * kTileHeight == kPassRows, "a pass fills the tiles");

// Tiles 0 to 2 hold sums, 3 to 5 rows, 6 weights.
class IntegerTiles {
 public:
  explicit IntegerTiles(std::int64_t block_size) {
    TileConfig config;
    for (int tile = 0; tile < 7; ++tile) {
      const bool has_rows = tile >= 3 && tile < 6;
      config.row_bytes[tile] = static_cast<std::uint16_t>(has_rows ? block_size : kTileRowBytes);
      config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? kTileHeight : block_size / 4);
    }
    config.load();
  }
  ~IntegerTiles() { TileConfig::release(); }

  void load_weights(const void* from) { asm volatile("tileloadd (%0,%1,1), %%tmm6" ::"r"(from), "r"(std::int64_t{64}) : "memory"); }

  // Writes the sums of 16 rows, `stride` bytes apart, to `sums`, 64 bytes a row.
  template <int kTile>
  void multiply(const std::int8_t* rows, std::int64_t stride, void* sums) {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile + 3) : "memory");
    asm volatile("tdpbssd %%tmm6, %%tmm%c1, %%tmm%c0" ::"i"(kTile), "i"(kTile + 3));
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(std::int64_t{64}), "i"(kTile) : "memory");
  }
};

// The bytes of a block of weights, four inputs of 16 outputs in 64 bytes; those of 8-bit codes lie in memory as they are.
template <typename Codes>
const void* bytes_of_block(const Codes& codes, const std::uint32_t* from, std::int64_t words, std::uint32_t* memory) {
  if constexpr (Codes::kPerWord == 1) {
    return from;
  } else {
    for (std::int64_t w = 0; w < words; ++w) {
      const Words word = load_as<Words>(from + w * kPanelOutputs);
      store_as(memory + 2 * w * kPanelOutputs, codes.template bytes<0>(word));
      store_as(memory + (2 * w + 1) * kPanelOutputs, codes.template bytes<1>(word));
    }
    return memory;
  }
}

template <typename Codes>
void multiply_whole_on_tiles_with(const QuantizedTask& task) {
  const PackedWeight& weight = *task.weight;
  const PreparedRows& rows = *task.rows;
  const Codes codes(weight);
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  const std::int64_t num_tiles = (task.num_rows + kTileHeight - 1) / kTileHeight;
  const float* mins = weight.mins == nullptr ? nullptr : task.scales + task.num_panels * kScaleBlocks * kPanelOutputs;
  std::memset(task.totals, 0, sizeof(float) * static_cast<std::size_t>(task.num_rows * task.num_panels * kPanelOutputs));
  IntegerTiles tiles(weight.block_size);
  alignas(64) std::uint32_t memory[8 * kPanelOutputs];
  alignas(64) std::int32_t sums[kTilesOfRows][kTileHeight][kPanelOutputs];
  for (std::int64_t first = 0; first < num_blocks; first += kScaleBlocks) {
    const Blocks blocks = {first, std::min(num_blocks, first + kScaleBlocks)};
    convert_scales(task, blocks);
    for (std::int64_t panel = 0; panel < task.num_panels; ++panel) {
      const std::uint32_t* from = weight.codes + ((task.first_panel + panel) * num_blocks + first) * block_words;
      for (std::int64_t block = blocks.first; block < blocks.last; ++block, from += block_words) {
        tiles.load_weights(bytes_of_block(codes, from, weight.words(), memory));
        const std::int64_t size = weight.block_size, of_block = block * rows.most_rows + task.first_row;
        const std::int8_t* inputs = rows.whole + of_block * size;
        tiles.multiply<0>(inputs, size, sums[0]);
        if (num_tiles > 1) tiles.multiply<1>(inputs + kTileHeight * size, size, sums[1]);
        if (num_tiles > 2) tiles.multiply<2>(inputs + 2 * kTileHeight * size, size, sums[2]);
        const std::int64_t at = (panel * kScaleBlocks + block - first) * kPanelOutputs;
        const Vector scale = load_vector(task.scales + at);
        const Vector minimum = mins == nullptr ? Vector{} : load_vector(mins + at);
        for (std::int64_t row = 0; row < task.num_rows; ++row) {
          float* to = task.totals + (row * task.num_panels + panel) * kPanelOutputs;
          const Vector sum = __builtin_convertvector(load_as<Integers>(sums[0][row]), Vector) * rows.steps[of_block + row];
          Vector total = load_vector(to) + scale * sum;
          if (mins != nullptr) total += minimum * rows.sums[of_block + row];
          store_as(to, total);
        }
      }
    }
  }
}

void multiply_whole_on_tiles(const QuantizedTask& task) {
  if (task.weight->kind == CodeKind::kInt8) return multiply_whole_on_tiles_with<WholeInt8>(task);
  multiply_whole_on_tiles_with<WholeTable>(task);
}
