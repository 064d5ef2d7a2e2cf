#include "ops/conv_rows.h"

#include <cstddef>

#include "ops/recurrent_driver.h"

namespace specdec {

void conv_rows(const ConvRowsArgs& args) {
  check_recurrent_rows(args.batch, args.num_slots, -1);
  const RecurrentKernel& kernel = recurrent_kernel();
  run_recurrent_tasks(args, kernel.conv[static_cast<std::size_t>(args.dtype)], {1, args.channels, kernel.conv_block},
                      args.channels * args.kernel);
}

}  // namespace specdec
