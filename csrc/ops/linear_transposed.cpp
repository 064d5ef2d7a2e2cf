#include "ops/linear_transposed.h"

#include <algorithm>
#include <cstddef>
#include <memory>

#include "kernels/amx_tiles.h"
#include "kernels/linear_transposed_work.h"
#include "kernels/multiversion.h"
#include "kernels/versions.h"
#include "ops/linear_driver.h"

namespace specdec {
namespace {

// The code of one version: a kernel, and what computes bf16 on tiles in its place.
struct Code {
  TransposedKernel kernel;
  LinearPlanner tile_plan = nullptr;
};

std::vector<Versions<Code>::Version> usable() {
  std::vector<Versions<Code>::Version> usable = {
      {"amx-bf16-portable", {transposed_portable::kKernel, linear_portable::kTransposedTilePlan}},
      {"portable", {transposed_portable::kKernel}}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", {transposed_x86_64_v3::kKernel}});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", {transposed_x86_64_v4::kKernel}});
    if (__builtin_cpu_supports("avx512bf16")) {
      usable.push_back({"avx512-bf16", {transposed_avx512_bf16::kKernel}});
      if (permitted_amx()) usable.push_back({"amx-bf16", {transposed_avx512_bf16::kKernel, linear_avx512_bf16::kTransposedTilePlan}});
    }
  }
#endif
  return usable;
}

Versions<Code> versions("linear_transposed", usable());

// The plan on tiles for a call, or null if the kernel computes it.
LinearPlanner tile_plan_of(const LinearArgs& args) {
  return args.dtype == DType::kBFloat16 ? versions.chosen().tile_plan : nullptr;
}

}  // namespace

std::int64_t linear_transposed_bytes(const LinearArgs& args) {
  if (const LinearPlanner planner = tile_plan_of(args)) return bytes_by_plan(args, planner);
  const TransposedKernel::Format& format = versions.chosen().kernel.formats[static_cast<int>(args.dtype)];
  return args.num_rows * format.num_units(args.in_features) * static_cast<std::int64_t>(sizeof(float));
}

void linear_transposed(const LinearArgs& args) {
  if (const LinearPlanner planner = tile_plan_of(args)) return linear_by_plan(args, planner);
  const TransposedKernel& kernel = versions.chosen().kernel;
  const TransposedKernel::Format& format = kernel.formats[static_cast<int>(args.dtype)];
  const std::unique_ptr<float[]> units(new float[static_cast<std::size_t>(linear_transposed_bytes(args)) / sizeof(float)]);
  format.prepare(args, units.get());
  const std::int64_t blocks = (args.out_features + kernel.step - 1) / kernel.step;
  // Waking a thread takes some microseconds, in which a core multiplies about 64K numbers.
  const bool worth_threads = args.num_rows * args.in_features * args.out_features > (1 << 18);
#pragma omp parallel for num_threads(args.num_threads) if (worth_threads) schedule(static)
  for (int part = 0; part < args.num_threads; ++part) {
    const std::int64_t begin = blocks * part / args.num_threads * kernel.step;
    const std::int64_t end = std::min(blocks * (part + 1) / args.num_threads * kernel.step, args.out_features);
    if (begin < end) format.outputs(args, units.get(), begin, end);
  }
}

std::vector<std::string> linear_transposed_versions() { return versions.names(); }

void choose_linear_transposed_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
