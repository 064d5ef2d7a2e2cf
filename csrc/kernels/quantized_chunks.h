// Many rows of whole numbers with VNNI: quantized_kernel.h includes this file after quantized_whole.h.
//
// The arithmetic is that of quantized_whole.h, in the same order. A chunk of blocks of two panels stays in the first-level
// cache while tile after tile of rows is multiplied with it: codes of 8 bits as they are, those of 4 bits as bytes, which
// the first tile makes for the others. The totals of a tile stay in registers for the blocks of a chunk.

constexpr std::int64_t kChunkBlocks = 16;
constexpr int kChunkPanels = 2;
constexpr std::int64_t kLine = 64;        // bytes of a line of the cache
constexpr std::int64_t kMostVectors = 8;  // of four bytes for each output, in a block
static_assert(kScaleBlocks % kChunkBlocks == 0, "");

// Codes that are multiplied later, and fetched meanwhile: `lines` lines of the cache for each block and panel.
struct Fetched {
  const char *from, *end;
  std::int64_t panel_bytes;  // from one panel to the next
  std::int64_t lines;
};

// The bytes of a panel's codes in a chunk: [blocks, vectors, kPanelOutputs], four bytes for each output.
typedef std::uint32_t PanelBytes[kChunkBlocks * kMostVectors * kPanelOutputs];

// Some rows times one or two panels, from a chunk's first block on.
struct ChunkOperands {
  const std::uint32_t* codes;    // of the first panel, panel_words from one panel to the next
  std::int64_t panel_words;
  PanelBytes* bytes;             // of each panel
  std::int64_t vectors;          // of a block: 4 or 8
  const float *scales, *mins;    // [panels, kScaleBlocks, kPanelOutputs]; mins are read if kHasMins
  WholeInputs inputs;            // of the first row
  std::int64_t row_blocks;       // blocks of a row
  float* totals;                 // of the first row and panel
  std::int64_t total_stride;     // from one row's totals to the next one's
  std::int64_t num_blocks;
  bool is_first;                 // whether the totals begin at zero
  Fetched fetched;
};

// Where a tile finds bytes: in codes that are bytes; in codes of which it makes bytes, for later tiles too; or in these.
enum class BytesFrom { kCodes, kUnpacked, kMade };

template <typename Codes, BytesFrom kFrom, bool kHasMins, int kP, int kR>
void add_chunk(const Codes& codes, const ChunkOperands& chunk) {
  Vector totals[kR][kP];
  const auto total_of = [&](int r, int p) { return chunk.totals + r * chunk.total_stride + p * kPanelOutputs; };
  for (int r = 0; r < kR; ++r) {
    for (int p = 0; p < kP; ++p) totals[r][p] = chunk.is_first ? Vector{} : load_vector(total_of(r, p));
  }
  const std::uint32_t* from = chunk.codes;
  std::int64_t made = 0;
  const std::int8_t* whole = chunk.inputs.whole;
  const char* fetched = chunk.fetched.from;
  for (std::int64_t block = 0; block < chunk.num_blocks; ++block) {
    for (std::int64_t line = 0; line < chunk.fetched.lines && fetched < chunk.fetched.end; ++line, fetched += kLine) {
      for (int p = 0; p < kP; ++p) __builtin_prefetch(fetched + p * chunk.fetched.panel_bytes, 0, 2);
    }
    Integers sums[kR][kP];
    for (int r = 0; r < kR; ++r) {
      for (int p = 0; p < kP; ++p) sums[r][p] = Integers{} + chunk.inputs.offsets[r * chunk.row_blocks + block];
    }
    for (std::int64_t four = 0; four < chunk.vectors; four += 4) {
      Words words[kP];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v, made += kPanelOutputs, whole += 4) {
        Words bytes[kP];
        for (int p = 0; p < kP; ++p) {
          std::uint32_t* to = chunk.bytes[p] + made;
          if constexpr (kFrom == BytesFrom::kMade) {
            bytes[p] = load_as<Words>(to);
          } else if constexpr (kFrom == BytesFrom::kCodes) {
            bytes[p] = codes.template bytes<0>(load_as<Words>(from + p * chunk.panel_words));
          } else {
            if (v % 2 == 0) words[p] = load_as<Words>(from + p * chunk.panel_words);
            bytes[p] = v % 2 == 0 ? codes.template bytes<0>(words[p]) : codes.template bytes<1>(words[p]);
            store_as(to, bytes[p]);
          }
        }
        if (kFrom == BytesFrom::kCodes || v % 2 == 0) from += kPanelOutputs;
        for (int r = 0; r < kR; ++r) {
          const auto input = load_as<std::uint32_t>(whole + r * chunk.inputs.stride);
          for (int p = 0; p < kP; ++p) sums[r][p] = add_products(sums[r][p], bytes[p], input);
        }
      }
    }
    for (int p = 0; p < kP; ++p) {
      const std::int64_t at = (p * kScaleBlocks + block) * kPanelOutputs;
      const Vector scale = load_vector(chunk.scales + at);
      for (int r = 0; r < kR; ++r) {
        const float step = chunk.inputs.steps[r * chunk.row_blocks + block];
        totals[r][p] = multiply_add(scale, __builtin_convertvector(sums[r][p], Vector) * step, totals[r][p]);
        if constexpr (kHasMins) {
          const float sum = chunk.inputs.sums[r * chunk.row_blocks + block];
          totals[r][p] = multiply_add(load_vector(chunk.mins + at), splat(sum), totals[r][p]);
        }
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int p = 0; p < kP; ++p) store_as(total_of(r, p), totals[r][p]);
  }
}

// Blocks [first, first + count) of some panels of a task; `next` are the codes that are multiplied after them.
struct Chunk {
  std::int64_t panel, first, count;
  const std::uint32_t* next;
  std::int64_t next_count;
};

// Multiplies a chunk with the rows of a task. `add` is called with a tile's first row in the task and its height.
template <typename Add>
SPECDEC_INLINE void multiply_chunk(const QuantizedTask& task, const Chunk& chunk, PanelBytes* bytes, Add add) {
  const PackedWeight& weight = *task.weight;
  const PreparedRows& rows = *task.rows;
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  const std::int64_t scale_at = (chunk.panel * kScaleBlocks + chunk.first % kScaleBlocks) * kPanelOutputs;
  const float* scales = task.scales + scale_at;
  const float* mins = scales + task.num_panels * kScaleBlocks * kPanelOutputs;
  const std::uint32_t* codes = weight.codes + ((task.first_panel + chunk.panel) * num_blocks + chunk.first) * block_words;
  const char* fetched = reinterpret_cast<const char*>(chunk.next);
  const char* fetched_end = fetched + 4 * chunk.next_count * block_words;
  const std::int64_t turns = (task.num_rows + kTileRows - 1) / kTileRows * chunk.count;
  const std::int64_t lines = ((fetched_end - fetched) / kLine + turns - 1) / turns;
  for (std::int64_t row = 0; row < task.num_rows;) {
    // About equal heights, as in run_tiles.
    const std::int64_t left = task.num_rows - row, tiles = (left + kTileRows - 1) / kTileRows;
    const std::int64_t height = (left + tiles - 1) / tiles;
    const std::int64_t at = task.first_row + row, block_at = at * num_blocks + chunk.first;
    const WholeInputs inputs{rows.whole + at * rows.padded + chunk.first * weight.block_size, rows.padded,
                             rows.steps + block_at, rows.offsets + block_at, rows.sums + block_at};
    float* totals = task.totals + (row * task.num_panels + chunk.panel) * kPanelOutputs;
    add(row, height,
        ChunkOperands{codes, num_blocks * block_words, bytes, weight.block_size / 4, scales, mins, inputs, num_blocks, totals,
                      task.num_panels * kPanelOutputs, chunk.count, chunk.first == 0,
                      {fetched, fetched_end, 4 * num_blocks * block_words, lines}});
    fetched += lines * chunk.count * kLine;
    row += height;
  }
}

template <typename Codes, bool kHasMins, int... kBelow>
void multiply_chunks_with(const QuantizedTask& task, std::integer_sequence<int, kBelow...>) {
  using AddChunk = void (*)(const Codes&, const ChunkOperands&);
  constexpr BytesFrom kFirst = Codes::kPerWord == 1 ? BytesFrom::kCodes : BytesFrom::kUnpacked;
  constexpr BytesFrom kLater = Codes::kPerWord == 1 ? BytesFrom::kCodes : BytesFrom::kMade;
  static constexpr AddChunk kAdds[2][kChunkPanels][kTileRows] = {
      {{add_chunk<Codes, kFirst, kHasMins, 1, kBelow + 1>...}, {add_chunk<Codes, kFirst, kHasMins, 2, kBelow + 1>...}},
      {{add_chunk<Codes, kLater, kHasMins, 1, kBelow + 1>...}, {add_chunk<Codes, kLater, kHasMins, 2, kBelow + 1>...}}};
  const PackedWeight& weight = *task.weight;
  const Codes codes(weight);
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  alignas(64) PanelBytes bytes[kChunkPanels];
  for (std::int64_t first = 0; first < num_blocks; first += kScaleBlocks) {
    const std::int64_t end = std::min(num_blocks, first + kScaleBlocks);
    convert_scales(task, {first, end});
    for (std::int64_t panel = 0; panel < task.num_panels; panel += kChunkPanels) {
      const std::int64_t panels = std::min<std::int64_t>(kChunkPanels, task.num_panels - panel);
      for (std::int64_t block = first; block < end; block += kChunkBlocks) {
        const bool is_last = block + kChunkBlocks >= end;  // then the next panels begin
        const std::int64_t next = is_last ? first + kChunkPanels * num_blocks : block + kChunkBlocks;
        const std::uint32_t* next_codes =
            weight.codes + ((task.first_panel + panel) * num_blocks + next) * block_words;
        const std::int64_t next_count = std::min(kChunkBlocks, end - (is_last ? first : next));
        multiply_chunk(task, {panel, block, std::min(kChunkBlocks, end - block), next_codes, next_count}, bytes,
                       [&](std::int64_t row, std::int64_t height, const ChunkOperands& operands) {
                         kAdds[row > 0][panels - 1][height - 1](codes, operands);
                       });
      }
    }
  }
}

template <typename Codes>
void multiply_chunks_of(const QuantizedTask& task) {
  constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
  if (task.weight->mins == nullptr) return multiply_chunks_with<Codes, false>(task, kRows);
  multiply_chunks_with<Codes, true>(task, kRows);
}

void multiply_chunks(const QuantizedTask& task) {
  if (task.weight->kind == CodeKind::kInt8) return multiply_chunks_of<WholeInt8>(task);
  multiply_chunks_of<WholeTable>(task);
}
