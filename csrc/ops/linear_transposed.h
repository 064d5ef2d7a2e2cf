// linear with weights that lie as [in_features, out_features]: GPT-2's Conv1D, experts that keep theirs transposed.
//
// They are read where they are: a copy would take their memory twice and miss what is changed in place. The contract is
// that of linear (linear.h), `weight` but for its layout; an output's products are added in an order of its own.
#pragma once

#include <string>
#include <vector>

#include "ops/linear.h"

namespace specdec {

void linear_transposed(const LinearArgs& args);

// Instruction sets that this machine can run, the best, which is chosen, last; tests choose others.
std::vector<std::string> linear_transposed_versions();
void choose_linear_transposed_version(const std::string& name);

}  // namespace specdec
