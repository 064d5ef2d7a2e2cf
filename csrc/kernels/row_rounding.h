// Rounds rows to whole numbers, block by block, as quantized_linear multiplies them.
#pragma once

#include <cstdint>

namespace specdec {

// Where the blocks of a rounded row belong, `stride` blocks apart. PreparedRows (quantized_work.h) says what they are.
struct RoundedRow {
  std::int8_t* whole;
  float *steps, *sums;
  std::int32_t* offsets;
  std::int64_t stride;
  std::int32_t offset;  // of the weights (QuantizedCode::offset_of)
};

// Round a row of fp32 numbers to blocks of 16 or 32 whole numbers. They overwrite the numbers.
void round_blocks_of_16(float* numbers, std::int64_t num_blocks, const RoundedRow& to);
void round_blocks_of_32(float* numbers, std::int64_t num_blocks, const RoundedRow& to);

}  // namespace specdec
