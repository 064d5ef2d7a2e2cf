// One forward of a program, for the files that define its steps.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace specdec {

// One forward, and the addresses of its buffers.
struct Program::Run {
  const Forward& forward;
  std::vector<Location> buffers;

  std::int64_t num_rows(Domain domain) const {
    return domain == Domain::kRows ? forward.num_rows : forward.num_logit_rows;
  }
};

}  // namespace specdec
