// Runs a plan of a linear layer (kernels/linear_work.h) on several threads: for linear, and for linear_transposed on tiles.
#pragma once

#include <cstdint>

#include "kernels/linear_work.h"
#include "ops/linear.h"

namespace specdec {

void linear_by_plan(const LinearArgs& args, LinearPlanner planner);

// Bytes that such a call allocates while it runs.
std::int64_t bytes_by_plan(const LinearArgs& args, LinearPlanner planner);

}  // namespace specdec
