// Many rows on tiles: quantized_kernel.h includes this file where SPECDEC_TILES names a class of amx_tiles.h.
//
// A tile instruction makes the sums of a block: 16 rows x the 16 outputs of a panel. They are scaled in fp32 and added to
// totals, block after block, as vectors do (quantized_kernel.h), so a row has the same bits there and here. The totals of 16
// rows stay in registers for kChunkBlocks blocks, whose weights stay in the first-level cache for all rows of the task.

constexpr std::int64_t kChunkBlocks = 16;
constexpr std::int64_t kBlocksAtOnce = 2;  // tiles of sums; while they are made, those of the blocks before are added
static_assert(kScaleBlocks % kChunkBlocks == 0 && kChunkBlocks % kBlocksAtOnce == 0, "");

// 16 rows and one panel, from a chunk's first block on.
struct TileOperands {
  const char* inputs;            // [blocks, 16, block size]
  const char* weights;           // [blocks, weight_bytes], as the tile instruction reads them
  const float *scales, *mins;    // [blocks, 16]; mins may be null
  const float *steps, *sums;     // [blocks, 16 rows], of the inputs; steps may be null
  float* totals;                 // of the first row, total_stride apart
  std::int64_t total_stride;
  std::int64_t num_rows, num_blocks;
  const char* fetched;           // what is fetched meanwhile, fetched_bytes for each block; or null
  std::int64_t fetched_bytes;
};

template <typename Sum>
using TileSums = Sum[kTileHeight][kPanelOutputs];

template <typename Product, int... kTile>
SPECDEC_INLINE void multiply_blocks(Product& product, const TileOperands& tile, std::int64_t first,
                                    TileSums<typename Product::Sum>* sums, std::integer_sequence<int, kTile...>) {
  const auto multiply = [&](auto number) {
    constexpr int kNumber = decltype(number)::value;
    const std::int64_t block = first + kNumber;
    if (block >= tile.num_blocks) return;
    if (tile.fetched != nullptr) {
      const char* fetched = tile.fetched + block * tile.fetched_bytes;
      for (std::int64_t b = 0; b < tile.fetched_bytes; b += kTileRowBytes) __builtin_prefetch(fetched + b, 0, 2);
    }
    product.template multiply<kNumber>(tile.inputs + block * product.input_bytes, tile.weights + block * product.weight_bytes,
                                       sums[kNumber]);
  };
  (multiply(std::integral_constant<int, kTile>()), ...);
}

template <bool kHasMins, typename Product>
void add_tile(Product& product, const TileOperands& tile, TileSums<typename Product::Sum> (&sums)[2][kBlocksAtOnce]) {
  constexpr auto kTiles = std::make_integer_sequence<int, kBlocksAtOnce>();
  Vector totals[kTileHeight][kPanelVectors];
  const auto total_of = [&](int row, int v) { return tile.totals + row * tile.total_stride + v * kLanes; };
#pragma GCC unroll 16
  for (int r = 0; r < kTileHeight; ++r) {
    for (int v = 0; v < kPanelVectors; ++v) totals[r][v] = r < tile.num_rows ? load_vector(total_of(r, v)) : Vector{};
  }
  multiply_blocks(product, tile, 0, sums[0], kTiles);
  for (std::int64_t first = 0, turn = 0; first < tile.num_blocks; first += kBlocksAtOnce, turn ^= 1) {
    multiply_blocks(product, tile, first + kBlocksAtOnce, sums[turn ^ 1], kTiles);
    const std::int64_t last = std::min(first + kBlocksAtOnce, tile.num_blocks);
    for (std::int64_t block = first; block < last; ++block) {
      const auto& own = sums[turn][block - first];
      const float* input_sums = tile.sums + block * kTileHeight;
      for (int v = 0; v < kPanelVectors; ++v) {
        const std::int64_t at = block * kPanelOutputs + v * kLanes;
        const Vector scale = load_vector(tile.scales + at);
        const Vector minimum = kHasMins ? load_vector(tile.mins + at) : Vector{};
#pragma GCC unroll 16
        for (int r = 0; r < kTileHeight; ++r) {
          Vector sum = Product::load(own[r] + v * kLanes);
          if constexpr (Product::kHasSteps) sum *= tile.steps[block * kTileHeight + r];
          totals[r][v] = multiply_add(scale, sum, totals[r][v]);
          if constexpr (kHasMins) totals[r][v] = multiply_add(minimum, splat(input_sums[r]), totals[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileHeight; ++r) {
    for (int v = 0; v < kPanelVectors && r < tile.num_rows; ++v) store_as(total_of(r, v), totals[r][v]);
  }
}

// Computes a task whose rows lie tile after tile: `inputs` is [tiles, blocks, 16, block size] as `product` reads them.
template <typename Product>
void multiply_on_tiles(const QuantizedTask& task, Product& product, const void* inputs) {
  const PackedWeight& weight = *task.weight;
  const PreparedRows& rows = *task.rows;
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  const float* mins = weight.mins == nullptr ? nullptr : task.scales + task.num_panels * kScaleBlocks * kPanelOutputs;
  std::memset(task.totals, 0, sizeof(float) * static_cast<std::size_t>(task.num_rows * task.num_panels * kPanelOutputs));
  alignas(64) std::uint32_t memory[kChunkBlocks * Product::kUnpackedWords];
  alignas(64) TileSums<typename Product::Sum> sums[2][kBlocksAtOnce] = {};  // rows that a tile lacks have some number too
  for (std::int64_t first = 0; first < num_blocks; first += kChunkBlocks) {
    const std::int64_t count = std::min(kChunkBlocks, num_blocks - first), scaled = first % kScaleBlocks;
    if (scaled == 0) convert_scales(task, {first, std::min(num_blocks, first + kScaleBlocks)});
    for (std::int64_t panel = 0; panel < task.num_panels; ++panel) {
      const std::uint32_t* codes = weight.codes + ((task.first_panel + panel) * num_blocks + first) * block_words;
      const bool is_last = panel + 1 == task.num_panels;
      const std::uint32_t* next = codes + (is_last ? count - panel * num_blocks : num_blocks) * block_words;
      const auto* weights = static_cast<const char*>(product.unpacked(codes, count, memory));
      const std::int64_t scale_at = (panel * kScaleBlocks + scaled) * kPanelOutputs;
      for (std::int64_t row = 0; row < task.num_rows; row += kTileHeight) {
        const std::int64_t block_at = ((task.first_row + row) / kTileHeight * num_blocks + first);
        const TileOperands tile{static_cast<const char*>(inputs) + block_at * product.input_bytes, weights,
                                task.scales + scale_at, mins == nullptr ? nullptr : mins + scale_at,
                                Product::kHasSteps ? rows.steps + block_at * kTileHeight : nullptr, rows.sums + block_at * kTileHeight,
                                task.totals + (row * task.num_panels + panel) * kPanelOutputs,
                                task.num_panels * kPanelOutputs, std::min<std::int64_t>(kTileHeight, task.num_rows - row), count,
                                row == 0 ? reinterpret_cast<const char*>(next) : nullptr, 4 * block_words};
        (mins == nullptr ? add_tile<false, Product> : add_tile<true, Product>)(product, tile, sums);
      }
    }
  }
}
