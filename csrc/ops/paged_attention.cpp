#include "ops/paged_attention.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/amx_tiles.h"
#include "kernels/attention_task.h"
#include "kernels/multiversion.h"
#include "kernels/versions.h"
#include "ops/bounds.h"

namespace specdec {
namespace {

std::vector<Versions<const AttentionKernel*>::Version> usable() {
  std::vector<Versions<const AttentionKernel*>::Version> usable = {
      {"amx-bf16-portable", &attention_portable::kTileKernel}, {"portable", &attention_portable::kKernel}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", &attention_x86_64_v3::kKernel});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", &attention_x86_64_v4::kKernel});
    if (__builtin_cpu_supports("avx512bf16")) usable.push_back({"avx512-bf16", &attention_avx512_bf16::kKernel});
    if (__builtin_cpu_supports("avx512bf16") && permitted_amx()) {
      usable.push_back({"amx-bf16", &attention_avx512_bf16::kTileKernel});
    }
  }
#endif
  return usable;
}

Versions<const AttentionKernel*> versions("paged_attention", usable());

void check(const PagedAttentionArgs& args) {
  if (args.cu_seqlens_q[0] != 0 || args.cu_seqlens_q[args.batch_size] > args.num_rows) {
    throw std::out_of_range("cu_seqlens_q goes from " + std::to_string(args.cu_seqlens_q[0]) + " to " +
                            std::to_string(args.cu_seqlens_q[args.batch_size]) + "; there are " +
                            std::to_string(args.num_rows) + " rows");
  }
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int64_t context = args.seqused_k[b];
    const std::int64_t rows = args.cu_seqlens_q[b + 1] - args.cu_seqlens_q[b];
    if (rows < 0 || context < rows || context > args.max_pages * args.page_size) {
      throw std::out_of_range("sequence " + std::to_string(b) + " has " + std::to_string(rows) + " rows and " +
                              std::to_string(context) + " KV entries; its block table has room for " +
                              std::to_string(args.max_pages * args.page_size));
    }
    check_pages(args.block_table, args.max_pages, args.page_size, args.num_pages, b, context);
  }
}

// Rows of a task: the more rows share a loaded tile the better, but every thread should get several tasks.
std::int64_t rows_per_task(const PagedAttentionArgs& args) {
  const std::int64_t fair = args.num_rows * args.num_kv_heads / (4 * args.num_threads);
  const std::int64_t most = kMostVectors / (args.num_heads / args.num_kv_heads);
  return std::max(kFewRows, std::min(fair, most));
}

std::vector<Task> make_tasks(const PagedAttentionArgs& args, std::int64_t rows_per_task) {
  std::vector<Task> tasks;
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int64_t rows = args.cu_seqlens_q[b + 1] - args.cu_seqlens_q[b];
    // Last rows first: they see most positions, and none of these long tasks should be the last to begin.
    for (std::int64_t row = (rows - 1) / rows_per_task * rows_per_task; rows > 0 && row >= 0; row -= rows_per_task) {
      for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
        tasks.push_back({b, row, std::min(rows_per_task, rows - row), head});
      }
    }
  }
  return tasks;
}

std::int64_t rounded_up(std::int64_t size, std::int64_t unit) { return (size + unit - 1) / unit * unit; }

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  check(args);
  const AttentionKernel& kernel = *versions.chosen();
  const std::size_t dtype = static_cast<std::size_t>(args.dtype);
  const std::vector<Task> tasks = make_tasks(args, rows_per_task(args));
  const std::int64_t num_tasks = static_cast<std::int64_t>(tasks.size());
  std::int64_t most_rows = 0;
  for (const Task& task : tasks) most_rows = std::max(most_rows, task.num_rows);
  const std::int64_t words = rounded_up(args.head_dim, kernel.numbers[dtype]) / kernel.numbers[dtype];
  // Short tasks are given out several at a time, because a task fetches what the next one reads. Every thread should get
  // several of these, too.
  const std::int64_t chunk = most_rows < kFewRows ? std::max<std::int64_t>(1, num_tasks / (4 * args.num_threads)) : 1;
#pragma omp parallel num_threads(args.num_threads) if (num_tasks > 1)
  {
    Scratch scratch(most_rows * (args.num_heads / args.num_kv_heads) + kernel.padding, words,
                    rounded_up(args.value_dim, kernel.lanes));
#pragma omp for schedule(dynamic, chunk)
    for (std::int64_t i = 0; i < num_tasks; ++i) {
      const bool ends_chunk = (i + 1) % chunk == 0 || i + 1 == num_tasks;
      kernel.run[dtype](args, scratch, tasks[i], ends_chunk ? nullptr : &tasks[i + 1]);
    }
  }
}

std::vector<std::string> attention_versions() { return versions.names(); }

void choose_attention_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
