#include "ops/selective_scan_rows.h"

#include <cstddef>

#include "ops/recurrent_driver.h"

namespace specdec {

void selective_scan_rows(const SelectiveScanRowsArgs& args) {
  check_recurrent_rows(args.batch, args.num_slots, args.num_kept);
  const RecurrentKernel& kernel = recurrent_kernel();
  const std::int64_t exponentials = args.channels * args.state_dim;
  run_recurrent_tasks(args, kernel.selective_scan[static_cast<std::size_t>(args.dtype)],
                      {args.num_groups, args.channels / args.num_groups, kernel.block}, 8 * exponentials);
}

}  // namespace specdec
