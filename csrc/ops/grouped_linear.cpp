#include "ops/grouped_linear.h"

#include "ops/expert_groups.h"
#include "ops/linear.h"
#include "ops/linear_transposed.h"

namespace specdec {

void grouped_linear(const GroupedLinearArgs& args) {
  const std::int64_t item = item_size(args.dtype), in_bytes = args.in_features * item, out_bytes = args.out_features * item;
  const auto compute = args.transposed ? linear_transposed : linear;
  const auto multiply = [&](std::int64_t expert, std::int64_t count, const char* inputs, char* results) {
    const char* weight = static_cast<const char*>(args.weight) + expert * args.out_features * in_bytes;
    const char* bias = args.bias == nullptr ? nullptr : static_cast<const char*>(args.bias) + expert * out_bytes;
    compute({args.dtype, count, args.in_features, args.out_features, inputs, args.in_features, weight, bias, results,
             args.num_threads});
  };
  multiply_by_expert({args.num_rows, args.num_choices, args.num_experts, args.num_vectors, args.expert_ids,
                      static_cast<const char*>(args.rows), args.row_stride * item, in_bytes, static_cast<char*>(args.out),
                      out_bytes},
                     multiply);
}

}  // namespace specdec
