// grouped_quantized_linear: every row times the quantised weights of the experts chosen for it.
// specdec_fast/ops/grouped_quantized_linear.py states the contract.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "ops/quantized_linear.h"

namespace specdec {

struct GroupedQuantizedLinearArgs {
  DType dtype;               // of rows, bias and result
  std::int64_t num_rows;
  std::int64_t num_choices;  // products per row
  std::int64_t num_vectors;  // inputs per row: one for all its choices, or one for each
  std::int64_t num_experts;
  const void* rows;          // [num_rows, num_vectors, in_features], rows `row_stride` elements apart
  std::int64_t row_stride;
  const std::int64_t* expert_ids;  // [num_rows, num_choices]
  PackedWeight weight;       // of the first expert; those of the others follow, tensor by tensor
  const void* bias;          // [num_experts, out_features], or null
  void* out;                 // [num_rows, num_choices, out_features], contiguous
  int num_threads;
};

// Throws std::out_of_range if an expert id lies outside the experts.
void grouped_quantized_linear(const GroupedQuantizedLinearArgs& args);

}  // namespace specdec
