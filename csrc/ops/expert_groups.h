// Products of rows and experts, sorted by expert: for grouped_linear and grouped_quantized_linear.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace specdec {

// One product per choice of a row.
struct ExpertProducts {
  std::int64_t num_rows, num_choices, num_experts;
  std::int64_t num_vectors;                // inputs per row: one for all its choices, or one for each
  const std::int64_t* expert_ids;          // [num_rows, num_choices]
  const char* rows;                        // [num_rows, num_vectors] inputs
  std::int64_t row_bytes, in_bytes;        // from one row to the next; of an input
  char* out;                               // [num_rows, num_choices] results, contiguous
  std::int64_t out_bytes;                  // of a result
};

// Multiplies `count` inputs, one after the other, with the weights of an expert, and writes as many results.
using MultiplyByExpert = std::function<void(std::int64_t expert, std::int64_t count, const char* inputs, char* results)>;

// Calls `multiply` once for every expert that is chosen, with its inputs in row order. Throws std::out_of_range if an expert
// id lies outside the experts.
void multiply_by_expert(const ExpertProducts& products, const MultiplyByExpert& multiply);

}  // namespace specdec
