#include "paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_task.h"
#include "bounds.h"
#include "exponential.h"
#include "multiversion.h"
#include "versions.h"

#define SPECDEC_ISA portable
#define SPECDEC_LANES 4
#include "attention_kernel.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define SPECDEC_ISA x86_64_v3
#define SPECDEC_LANES 8
#include "attention_kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define SPECDEC_ISA x86_64_v4
#define SPECDEC_LANES 16
#include "attention_kernel.h"
#pragma GCC pop_options
#endif

namespace specdec {
namespace {

using Run = void (*)(const PagedAttentionArgs&, Scratch&, const Task&);

using Runs = const std::array<Run, 3>*;  // by DType

std::vector<Versions<Runs>::Version> usable() {
  std::vector<Versions<Runs>::Version> usable = {{"portable", &portable::kRun}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", &x86_64_v3::kRun});
  if (__builtin_cpu_supports("x86-64-v4")) usable.push_back({"x86-64-v4", &x86_64_v4::kRun});
#endif
  return usable;
}

Versions<Runs> versions("paged_attention", usable());

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

std::vector<Task> make_tasks(const PagedAttentionArgs& args) {
  std::vector<Task> tasks;
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int64_t rows = args.cu_seqlens_q[b + 1] - args.cu_seqlens_q[b];
    for (std::int64_t row = 0; row < rows; row += kRowsPerTask) {
      for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
        tasks.push_back({b, row, std::min(kRowsPerTask, rows - row), head});
      }
    }
  }
  return tasks;
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  check(args);
  const Run run = (*versions.chosen())[static_cast<std::size_t>(args.dtype)];
  const std::vector<Task> tasks = make_tasks(args);
  const std::int64_t num_tasks = static_cast<std::int64_t>(tasks.size());
#pragma omp parallel num_threads(args.num_threads) if (num_tasks > 1)
  {
    Scratch scratch(args.num_heads / args.num_kv_heads, args.head_dim, args.value_dim);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < num_tasks; ++i) run(args, scratch, tasks[i]);
  }
}

std::vector<std::string> attention_versions() { return versions.names(); }

void choose_attention_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
