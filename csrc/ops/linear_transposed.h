// linear with weights stored as [in_features, out_features], as in GPT-2's Conv1D and in some mixtures of experts.
//
// The weights are read where they are: a copy would double their memory and would not follow changes in place. The
// contract is that of linear (linear.h), except for the layout of `weight`. Products are added in another order than there.
#pragma once

#include <string>
#include <vector>

#include "ops/linear.h"

namespace specdec {

void linear_transposed(const LinearArgs& args);

// The instruction sets that this machine can run, the best last. The best is chosen; tests choose others.
// Bytes that a call allocates while it runs: prepared inputs.
std::int64_t linear_transposed_bytes(const LinearArgs& args);

std::vector<std::string> linear_transposed_versions();
void choose_linear_transposed_version(const std::string& name);

}  // namespace specdec
