#include "ops/conv_rows.h"

#include <cstddef>

#include "ops/recurrent_driver.h"

namespace specdec {

void conv_rows(const ConvRowsArgs& args) {
  check_recurrent_rows(args.batch, args.num_slots, -1);
  const auto task = recurrent_kernel().conv[static_cast<std::size_t>(args.dtype)];
  run_recurrent_tasks(args, task, 1, args.channels, args.channels * args.kernel);
}

}  // namespace specdec
