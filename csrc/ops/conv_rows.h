// conv_rows_: the short causal convolution of recurrent layers. specdec_fast/ops/conv_rows.py states the contract.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "ops/recurrent_rows.h"

namespace specdec {

struct ConvRowsArgs {
  DType dtype;
  const void* rows;  // [num_rows, channels], rows `stride_row` elements apart
  std::int64_t stride_row;
  void* state;  // [num_slots, num_places, channels], contiguous
  std::int64_t num_slots;
  std::int64_t num_places;
  std::int64_t channels;
  const void* weight;  // [channels, kernel], contiguous
  std::int64_t kernel;
  const void* bias;  // [channels], or null
  bool silu;
  RecurrentRows batch;
  void* out;  // [num_rows, channels], contiguous
  int num_threads;
};

// Throws std::out_of_range, before it writes anything, if a sequence reaches outside its arrays.
void conv_rows(const ConvRowsArgs& args);

}  // namespace specdec
