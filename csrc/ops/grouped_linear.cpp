#include "ops/grouped_linear.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "ops/linear_transposed.h"

namespace specdec {
namespace {

// Products sorted by expert: those of expert e are members[starts[e]] to members[starts[e + 1] - 1], in row order.
struct Groups {
  std::vector<std::int64_t> starts, members;
};

Groups grouped(const GroupedLinearArgs& args) {
  const std::int64_t count = args.num_rows * args.num_choices;
  Groups groups{std::vector<std::int64_t>(static_cast<std::size_t>(args.num_experts + 1)),
                std::vector<std::int64_t>(static_cast<std::size_t>(count))};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t expert = args.expert_ids[i];
    if (expert < 0 || expert >= args.num_experts) {
      throw std::out_of_range("expert_ids has a " + std::to_string(expert) + "; there are " +
                              std::to_string(args.num_experts) + " experts");
    }
    ++groups.starts[expert + 1];
  }
  for (std::int64_t e = 0; e < args.num_experts; ++e) groups.starts[e + 1] += groups.starts[e];
  std::vector<std::int64_t> next(groups.starts);
  for (std::int64_t i = 0; i < count; ++i) groups.members[next[args.expert_ids[i]]++] = i;
  return groups;
}

}  // namespace

void grouped_linear(const GroupedLinearArgs& args) {
  const Groups groups = grouped(args);
  const std::int64_t item = item_size(args.dtype), in_bytes = args.in_features * item, out_bytes = args.out_features * item;
  const char* rows = static_cast<const char*>(args.rows);
  char* out = static_cast<char*>(args.out);
  const auto input = [&](std::int64_t i) {
    const std::int64_t vector = args.num_vectors == 1 ? 0 : i % args.num_choices;
    return rows + i / args.num_choices * args.row_stride * item + vector * in_bytes;
  };
  std::int64_t largest = 0;
  for (std::int64_t e = 0; e < args.num_experts; ++e) largest = std::max(largest, groups.starts[e + 1] - groups.starts[e]);
  const std::unique_ptr<char[]> inputs(new char[static_cast<std::size_t>(largest * in_bytes)]);
  const std::unique_ptr<char[]> outputs(new char[static_cast<std::size_t>(largest * out_bytes)]);
  const auto compute = args.transposed ? linear_transposed : linear;
  for (std::int64_t e = 0; e < args.num_experts; ++e) {
    const std::int64_t* members = groups.members.data() + groups.starts[e];
    const std::int64_t count = groups.starts[e + 1] - groups.starts[e];
    if (count == 0) continue;
    const char* weight = static_cast<const char*>(args.weight) + e * args.out_features * in_bytes;
    const char* bias = args.bias == nullptr ? nullptr : static_cast<const char*>(args.bias) + e * out_bytes;
    const auto multiply = [&](const char* from, char* to) {
      compute({args.dtype, count, args.in_features, args.out_features, from, args.in_features, weight, bias, to,
               args.num_threads});
    };
    if (count == 1) {
      multiply(input(members[0]), out + members[0] * out_bytes);
      continue;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(inputs.get() + i * in_bytes, input(members[i]), static_cast<std::size_t>(in_bytes));
    }
    multiply(inputs.get(), outputs.get());
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(out + members[i] * out_bytes, outputs.get() + i * out_bytes, static_cast<std::size_t>(out_bytes));
    }
  }
}

}  // namespace specdec
