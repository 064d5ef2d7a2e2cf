#include "ops/expert_groups.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

// Products sorted by expert: those of expert e are members[starts[e]] to members[starts[e + 1] - 1], in row order.
struct Groups {
  std::vector<std::int64_t> starts, members;
};

Groups grouped(const ExpertProducts& products) {
  const std::int64_t count = products.num_rows * products.num_choices;
  Groups groups{std::vector<std::int64_t>(static_cast<std::size_t>(products.num_experts + 1)),
                std::vector<std::int64_t>(static_cast<std::size_t>(count))};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t expert = products.expert_ids[i];
    if (expert < 0 || expert >= products.num_experts) {
      throw std::out_of_range("expert_ids has a " + std::to_string(expert) + "; there are " +
                              std::to_string(products.num_experts) + " experts");
    }
    ++groups.starts[expert + 1];
  }
  for (std::int64_t e = 0; e < products.num_experts; ++e) groups.starts[e + 1] += groups.starts[e];
  std::vector<std::int64_t> next(groups.starts);
  for (std::int64_t i = 0; i < count; ++i) groups.members[next[products.expert_ids[i]]++] = i;
  return groups;
}

}  // namespace

void multiply_by_expert(const ExpertProducts& products, const MultiplyByExpert& multiply) {
  const Groups groups = grouped(products);
  const std::int64_t in_bytes = products.in_bytes, out_bytes = products.out_bytes;
  const auto input = [&](std::int64_t i) {
    const std::int64_t vector = products.num_vectors == 1 ? 0 : i % products.num_choices;
    return products.rows + i / products.num_choices * products.row_bytes + vector * in_bytes;
  };
  std::int64_t largest = 0;
  for (std::int64_t e = 0; e < products.num_experts; ++e) largest = std::max(largest, groups.starts[e + 1] - groups.starts[e]);
  const std::unique_ptr<char[]> inputs(new char[static_cast<std::size_t>(largest * in_bytes)]);
  const std::unique_ptr<char[]> results(new char[static_cast<std::size_t>(largest * out_bytes)]);
  for (std::int64_t e = 0; e < products.num_experts; ++e) {
    const std::int64_t* members = groups.members.data() + groups.starts[e];
    const std::int64_t count = groups.starts[e + 1] - groups.starts[e];
    if (count == 0) continue;
    if (count == 1) {
      multiply(e, 1, input(members[0]), products.out + members[0] * out_bytes);
      continue;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(inputs.get() + i * in_bytes, input(members[i]), static_cast<std::size_t>(in_bytes));
    }
    multiply(e, count, inputs.get(), results.get());
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(products.out + members[i] * out_bytes, results.get() + i * out_bytes, static_cast<std::size_t>(out_bytes));
    }
  }
}

}  // namespace specdec
