// grouped_linear: every row times the weights of the experts chosen for it.
// specdec_fast/ops/grouped_linear.py states the contract.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace specdec {

struct GroupedLinearArgs {
  DType dtype;
  std::int64_t num_rows;
  std::int64_t num_choices;  // products per row
  std::int64_t num_vectors;  // inputs per row: one for all its choices, or one for each
  std::int64_t in_features;
  std::int64_t out_features;
  std::int64_t num_experts;
  const void* rows;          // [num_rows, num_vectors, in_features], rows `row_stride` elements apart
  std::int64_t row_stride;
  const std::int64_t* expert_ids;  // [num_rows, num_choices]
  const void* weight;        // [num_experts, out_features, in_features], or with the last two axes exchanged
  bool transposed;
  const void* bias;          // [num_experts, out_features], or null
  void* out;                 // [num_rows, num_choices, out_features], contiguous
  int num_threads;
};

// Throws std::out_of_range if an expert id lies outside the experts.
void grouped_linear(const GroupedLinearArgs& args);

}  // namespace specdec
