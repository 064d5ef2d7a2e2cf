#include "ops/linear_attention_rows.h"

#include <cstddef>

#include "ops/recurrent_driver.h"

namespace specdec {

void linear_attention_rows(const LinearAttentionRowsArgs& args) {
  check_recurrent_rows(args.batch, args.num_slots, args.num_kept);
  const RecurrentKernel& kernel = recurrent_kernel();
  run_recurrent_tasks(args, kernel.linear_attention[static_cast<std::size_t>(args.dtype)],
                      {args.value_heads, args.value_dim, kernel.block},
                      args.value_heads * args.key_dim * args.value_dim);
}

}  // namespace specdec
