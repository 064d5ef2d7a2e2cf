#include "ops/linear.h"

#include <algorithm>
#include <cstddef>

#include "kernels/amx_tiles.h"
#include "kernels/linear_work.h"
#include "kernels/multiversion.h"
#include "kernels/versions.h"
#include "ops/buffer.h"
#include "ops/linear_driver.h"

namespace specdec {
namespace {

std::vector<Versions<const LinearPlans*>::Version> usable() {
  std::vector<Versions<const LinearPlans*>::Version> usable = {
      {"amx-bf16-portable", &linear_portable::kTilePlans}, {"portable", &linear_portable::kPlans}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", &linear_x86_64_v3::kPlans});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", &linear_x86_64_v4::kPlans});
    if (__builtin_cpu_supports("avx512bf16")) usable.push_back({"avx512-bf16", &linear_avx512_bf16::kPlans});
    if (__builtin_cpu_supports("avx512bf16") && permitted_amx()) usable.push_back({"amx-bf16", &linear_avx512_bf16::kTilePlans});
  }
#endif
  return usable;
}

Versions<const LinearPlans*> versions("linear", usable());

std::int64_t quotient(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Into how many parts the rows are divided, at most one per thread. Equal numbers of threads divide the outputs of each
// part. Then they read inputs that another thread has prepared, which takes about as long as a quarter of a granule.
int parts_of_rows(const LinearPlan& plan, std::int64_t num_blocks, std::int64_t out_features, int num_threads) {
  const std::int64_t granules = quotient(out_features, plan.granule);
  int best = 1;
  std::int64_t least = 0;
  for (int parts = 1; parts <= num_threads; ++parts) {
    if (num_threads % parts != 0) continue;
    const std::int64_t rows = quotient(num_blocks, parts) * plan.height + plan.weight_rows;
    const std::int64_t read = parts < num_threads ? quotient(num_blocks, parts) * plan.height : 0;
    const std::int64_t time = 4 * rows * quotient(granules, num_threads / parts) + read;
    if (parts == 1 || time < least) best = parts, least = time;
  }
  return best;
}

Range share(std::int64_t size, std::int64_t granule, int part, int parts) {
  const std::int64_t granules = quotient(size, granule);
  return {std::min(size, granules * part / parts * granule), std::min(size, granules * (part + 1) / parts * granule)};
}

LinearPlanner planner_of(const LinearArgs& args) { return (*versions.chosen())[static_cast<std::size_t>(args.dtype)]; }

// Blocks of rows that are prepared at a time.
std::int64_t blocks_of_pass(const LinearPlan& plan, std::int64_t num_rows) {
  const std::int64_t num_blocks = quotient(num_rows, plan.height);
  return quotient(num_blocks, quotient(num_blocks, plan.most_blocks));
}

std::int64_t buffer_bytes_of(const LinearPlan& plan) { return quotient(plan.buffer_bytes, Buffer::kAlignment) * Buffer::kAlignment; }

}  // namespace

std::int64_t bytes_by_plan(const LinearArgs& args, LinearPlanner planner) {
  if (args.num_rows == 0 || args.out_features == 0) return 0;
  const LinearPlan plan = planner(args);
  const std::int64_t inputs = blocks_of_pass(plan, args.num_rows) * plan.block_bytes;
  return inputs + buffer_bytes_of(plan) * args.num_threads + 2 * Buffer::kAlignment;
}

void linear_by_plan(const LinearArgs& args, LinearPlanner planner) {
  if (args.num_rows == 0 || args.out_features == 0) return;
  const LinearPlan plan = planner(args);
  const std::int64_t pass_blocks = blocks_of_pass(plan, args.num_rows), buffer_bytes = buffer_bytes_of(plan);
  const Buffer inputs(pass_blocks * plan.block_bytes), buffers(buffer_bytes * args.num_threads);
  // Waking a thread takes some microseconds, in which a core multiplies about 64K numbers.
  const bool worth_threads = args.num_rows * args.in_features * args.out_features > (1 << 18);
  const int num_threads = worth_threads ? args.num_threads : 1;
  const int row_parts = parts_of_rows(plan, pass_blocks, args.out_features, num_threads);
  const int output_parts = num_threads / row_parts;
  const bool prepares_own = num_threads > 1 && output_parts == 1;  // no thread waits for blocks that another prepares
  const bool shares_preparing = num_threads > 1 && !prepares_own && args.num_rows * args.in_features > (1 << 16);
  for (std::int64_t first = 0; first < args.num_rows; first += pass_blocks * plan.height) {
    const std::int64_t num_rows = std::min(pass_blocks * plan.height, args.num_rows - first);
    const LinearWork work{args, plan, inputs.get(), first, num_rows};
    const std::int64_t prepared_first = prepares_own || shares_preparing ? 0 : work.num_blocks();
    for (std::int64_t block = 0; block < prepared_first; ++block) plan.prepare(work, block);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      if (shares_preparing) {
#pragma omp for schedule(static)
        for (std::int64_t block = 0; block < work.num_blocks(); ++block) plan.prepare(work, block);
      }
#pragma omp for schedule(static) nowait
      for (int part = 0; part < num_threads; ++part) {
        const Range blocks = share(work.num_blocks(), 1, part / output_parts, row_parts);
        if (blocks.begin == blocks.end) continue;  // there may be more parts than blocks
        for (std::int64_t block = blocks.begin; prepares_own && block < blocks.end; ++block) plan.prepare(work, block);
        plan.outputs(work, blocks, share(args.out_features, plan.granule, part % output_parts, output_parts),
                     buffers.get() + part * buffer_bytes);
      }
    }
  }
}

std::int64_t linear_bytes(const LinearArgs& args) { return bytes_by_plan(args, planner_of(args)); }

void linear(const LinearArgs& args) { linear_by_plan(args, planner_of(args)); }

std::vector<std::string> linear_versions() { return versions.names(); }

void choose_linear_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
