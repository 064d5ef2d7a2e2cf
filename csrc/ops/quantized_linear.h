// quantized_linear: rows times a weight matrix of 8- or 4-bit codes. Every sum has one order, whatever the number of rows.
// specdec_fast/ops/quantized_linear.py states the contract, specdec_fast/quantization/packed_weight.py the layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

enum class CodeKind : int { kInt8 = 0, kFloat8 = 1, kTable = 2 };

constexpr std::int64_t kPanelOutputs = 16;
constexpr std::int64_t kSuperGroup = 256;  // inputs that share a super-scale

struct PackedWeight {
  std::int64_t in_features, out_features;
  std::int64_t block_size;       // 16 or 32 inputs
  std::int64_t group_size;       // inputs of a scale, a multiple of block_size
  CodeKind kind;
  bool rounds_rows;              // rows are rounded to 8-bit integers, block by block
  const std::uint32_t* codes;    // [panels, blocks, words, kPanelOutputs]
  const float* table;            // [16], of kTable
  DType scale_dtype;             // unless there are super-scales: then scales and minima are 8-bit integers
  const void* scales;            // [panels, groups, kPanelOutputs]
  const void* mins;              // the same, or null
  const std::uint16_t* super_scales;  // [panels, supers, kPanelOutputs] fp16: what scales are multiplied with; or null
  const std::uint16_t* super_mins;    // the same of minima; null without super-scales or minima

  std::int64_t num_panels() const { return (out_features + kPanelOutputs - 1) / kPanelOutputs; }
  std::int64_t num_blocks() const { return (in_features + block_size - 1) / block_size; }
  std::int64_t padded() const { return num_blocks() * block_size; }  // inputs of a row, with zeros after the last one
  std::int64_t num_groups() const { return (in_features + group_size - 1) / group_size; }
  std::int64_t num_supers() const { return (in_features + kSuperGroup - 1) / kSuperGroup; }
  std::int64_t scale_bytes() const { return super_scales == nullptr ? item_size(scale_dtype) : 1; }  // of one number
  std::int64_t codes_bytes() const { return num_panels() * num_blocks() * words() * kPanelOutputs * 4; }
  std::int64_t words() const { return block_size / (kind == CodeKind::kTable ? 8 : 4); }  // of a block, for each output
};

struct QuantizedLinearArgs {
  DType dtype;               // of rows, bias and result
  std::int64_t num_rows;
  const void* rows;          // [num_rows, in_features], `row_stride` elements apart
  std::int64_t row_stride;
  PackedWeight weight;
  const void* bias;          // [out_features], or null
  void* out;                 // [num_rows, out_features], contiguous
  int num_threads;
};

void quantized_linear(const QuantizedLinearArgs& args);

// Bytes that a call allocates while it runs.
std::int64_t quantized_linear_bytes(std::int64_t num_rows, std::int64_t in_features, std::int64_t block_size, bool rounds_rows,
                                    int num_threads);

// The instruction sets that this machine can run, the best last. The best is chosen; tests choose others.
std::vector<std::string> quantized_linear_versions();
void choose_quantized_linear_version(const std::string& name);

}  // namespace specdec
