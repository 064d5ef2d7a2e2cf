#include "ops/grouped_quantized_linear.h"

#include "ops/expert_groups.h"

namespace specdec {
namespace {

PackedWeight expert_of(const PackedWeight& first, std::int64_t expert) {
  const std::int64_t panels = first.num_panels(), scales = panels * first.num_groups() * kPanelOutputs;
  const std::int64_t scale_bytes = expert * scales * first.scale_bytes();
  const std::int64_t supers = expert * panels * first.num_supers() * kPanelOutputs;
  PackedWeight weight = first;
  weight.codes += expert * panels * first.num_blocks() * first.words() * kPanelOutputs;
  weight.scales = static_cast<const char*>(first.scales) + scale_bytes;
  if (first.mins != nullptr) weight.mins = static_cast<const char*>(first.mins) + scale_bytes;
  if (first.super_scales != nullptr) weight.super_scales += supers;
  if (first.super_mins != nullptr) weight.super_mins += supers;
  return weight;
}

}  // namespace

void grouped_quantized_linear(const GroupedQuantizedLinearArgs& args) {
  const std::int64_t item = item_size(args.dtype), in_bytes = args.weight.in_features * item;
  const std::int64_t out_bytes = args.weight.out_features * item;
  const auto multiply = [&](std::int64_t expert, std::int64_t count, const char* inputs, char* results) {
    const char* bias = args.bias == nullptr ? nullptr : static_cast<const char*>(args.bias) + expert * out_bytes;
    quantized_linear({args.dtype, count, inputs, args.weight.in_features, expert_of(args.weight, expert), bias, results,
                      args.num_threads});
  };
  multiply_by_expert({args.num_rows, args.num_choices, args.num_experts, args.num_vectors, args.expert_ids,
                      static_cast<const char*>(args.rows), args.row_stride * item, in_bytes, static_cast<char*>(args.out),
                      out_bytes},
                     multiply);
}

}  // namespace specdec
