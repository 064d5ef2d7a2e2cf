// How an op of recurrent layers divides its work among threads: into blocks of channels, each with all rows of a sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/recurrent_work.h"
#include "ops/recurrent_rows.h"

namespace specdec {

// The kernel in use.
const RecurrentKernel& recurrent_kernel();

// The channels of a sequence: `parts` heads or groups with `channels` channels each, in blocks of `block`.
struct Channels {
  std::int64_t parts;
  std::int64_t channels;
  std::int64_t block;
};

// Runs `task` for every block of channels of every sequence. `row_products`: products of one row in all channels.
template <typename Args>
void run_recurrent_tasks(const Args& args, RecurrentTask<Args> task, const Channels& of, std::int64_t row_products) {
  const std::int64_t block = of.block, channels = of.channels, parts = of.parts, blocks = (channels + block - 1) / block;
  const std::int64_t num_tasks = args.batch.batch_size * parts * blocks;
  // Waking a thread takes some microseconds, in which a core multiplies about 64K numbers.
  const bool worth_threads = total_rows(args.batch) * row_products > (1 << 17);
#pragma omp parallel num_threads(args.num_threads) if (worth_threads && num_tasks > 1)
  {
    std::vector<float> scratch(static_cast<std::size_t>(scratch_of(args, block)));
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < num_tasks; ++i) {
      const std::int64_t first = i % blocks * block;
      task(args, {i / blocks / parts, i / blocks % parts, first, std::min(block, channels - first)}, scratch.data());
    }
  }
}

}  // namespace specdec
