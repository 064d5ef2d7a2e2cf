// One call of quantized_linear as its kernels see it. The kernels have one source file per instruction set.
#pragma once

#include <cstdint>

#include "kernels/multiversion.h"
#include "ops/quantized_linear.h"

namespace specdec {

constexpr std::int64_t kMostPanels = 4;       // panels that a kernel multiplies at a time
constexpr std::int64_t kScaleBlocks = 64;     // blocks whose scales are converted at a time; their codes stay in a cache
constexpr std::int64_t kPassRows = 48;        // rows that vectors multiply with them meanwhile
constexpr std::int64_t kPreparedRows = 192;   // rows that are prepared at a time; tiles and chunks multiply all of them meanwhile

// Rows as the kernels read them. Inputs after the last one are zeros. Vectors read [rows, blocks, ...]; tiles read
// [tiles, blocks, 16, ...], because a tile's rows lie together.
struct PreparedRows {
  std::int64_t num_rows;
  std::int64_t padded;           // inputs of a row, a multiple of the block size
  const float* numbers;          // block_size for each row and block, unless rows are rounded or stay bf16
  const std::uint16_t* halves;   // the same, if they stay bf16, for tiles
  const std::int8_t* whole;      // the same, if they are rounded
  const float* steps;            // one for each row and block: what a whole number stands for
  const std::int32_t* offsets;   // the same: what is added to the sums of codes without a sign
  const float* sums;             // the same: of a block's inputs
};

// What a thread computes: the outputs of some panels for some rows.
struct QuantizedTask {
  const PackedWeight* weight;
  const PreparedRows* rows;
  std::int64_t first_row, num_rows;      // at most the code's pass_rows, for tiles kPreparedRows
  std::int64_t first_panel, num_panels;  // at most kMostPanels
  float* totals;                         // [num_rows, num_panels, kPanelOutputs]
  float* scales;                         // memory for [2, num_panels, kScaleBlocks, kPanelOutputs]
};

struct QuantizedCode {
  void (*multiply)(const QuantizedTask&);        // weights times numbers
  // Whether multiply_halves multiplies rows of this dtype; null: none.
  bool (*takes_halves)(const PackedWeight&, DType);
  void (*multiply_halves)(const QuantizedTask&);   // weights times bf16
  void (*multiply_flushed)(const QuantizedTask&);  // the same bits from numbers, faster for few rows; or null
  void (*multiply_whole)(const QuantizedTask&);  // weights times whole numbers
  int (*offset_of)(const PackedWeight&);         // what multiply_whole adds to values, to have no sign
  bool whole_tiles;                              // whether multiply_whole reads rows as tiles do
  std::int64_t pass_rows = kPassRows;            // rows that it multiplies with a part of the weights while that stays in a cache
};

// The code of one instruction set, by the number of rows: with tiles, 16 rows take as long as one, and chunks are made for
// some rows at least.
struct QuantizedVersion {
  const QuantizedCode *numbers, *few_whole, *many_whole;
  std::int64_t half_rows = 0, table_rows = 0, whole_rows = 0;  // from so many rows on, the latter are faster

  std::int64_t least_half_rows(CodeKind kind) const { return kind == CodeKind::kTable ? table_rows : half_rows; }

  const QuantizedCode& of(bool rounds_rows, std::int64_t num_rows) const {
    return *(!rounds_rows ? numbers : num_rows < whole_rows ? few_whole : many_whole);
  }
};

namespace quantized_portable {
extern const QuantizedCode kCode, kTileCode;
}
#ifdef SPECDEC_X86_64_LEVELS
namespace quantized_x86_64_v3 {
extern const QuantizedCode kCode;
}
namespace quantized_x86_64_v4 {
extern const QuantizedCode kCode;
}
namespace quantized_avx512_vnni {
extern const QuantizedCode kCode, kChunkCode;
}
namespace quantized_amx {
extern const QuantizedCode kTileCode;
}
#endif

}  // namespace specdec
