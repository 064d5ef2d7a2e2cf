#include "ops/selective_scan_rows.h"

#include <cstddef>

#include "ops/recurrent_driver.h"

namespace specdec {

void selective_scan_rows(const SelectiveScanRowsArgs& args) {
  check_recurrent_rows(args.batch, args.num_slots, args.num_kept);
  const auto task = recurrent_kernel().selective_scan[static_cast<std::size_t>(args.dtype)];
  const std::int64_t exponentials = args.channels * args.state_dim;
  run_recurrent_tasks(args, task, args.num_groups, args.channels / args.num_groups, 8 * exponentials);
}

}  // namespace specdec
