// linear: rows times a weight matrix. Every sum has one order, whatever the number of rows.
// specdec_fast/ops/linear.py states the contract.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

struct LinearArgs {
  DType dtype;
  std::int64_t num_rows;
  std::int64_t in_features;
  std::int64_t out_features;
  const void* rows;         // [num_rows, in_features], `row_stride` elements apart
  std::int64_t row_stride;
  const void* weight;       // [out_features, in_features], contiguous
  const void* bias;         // [out_features], or null
  void* out;                // [num_rows, out_features], contiguous
  int num_threads;
};

void linear(const LinearArgs& args);

// Bytes that a call allocates while it runs: prepared inputs, and weights that its threads have packed.
std::int64_t linear_bytes(const LinearArgs& args);

// The instruction sets that this machine can run, the best last. The best is chosen; tests choose others.
std::vector<std::string> linear_versions();
void choose_linear_version(const std::string& name);

}  // namespace specdec
