#include "linear.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

#include "multiversion.h"
#include "versions.h"

#ifdef SPECDEC_X86_64_LEVELS
#include <immintrin.h>
#endif

#define SPECDEC_INLINE inline __attribute__((always_inline))

namespace specdec {
namespace {

// One dtype on one instruction set.
struct LinearKernel {
  void (*prepare)(const LinearArgs&, void* inputs, std::int64_t padded);
  void (*outputs)(const LinearArgs&, const void* inputs, std::int64_t padded, std::int64_t begin, std::int64_t end,
                  void* buffer);
  std::int64_t (*buffer_bytes)(const LinearArgs&, std::int64_t padded);  // of one thread
  std::int64_t step;        // inputs are padded to a multiple of it
  std::int64_t input_size;  // bytes
};

}  // namespace
}  // namespace specdec

#define SPECDEC_ISA linear_portable
#define SPECDEC_LANES 4
#include "linear_kernel.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define SPECDEC_ISA linear_x86_64_v3
#define SPECDEC_LANES 8
#include "linear_kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define SPECDEC_ISA linear_x86_64_v4
#define SPECDEC_LANES 16
#include "linear_kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#define SPECDEC_ISA linear_avx512_bf16
#define SPECDEC_LANES 16
#define SPECDEC_DOT_BF16
#include "linear_kernel.h"
#undef SPECDEC_DOT_BF16
#pragma GCC pop_options
#endif

namespace specdec {
namespace {

using Kernels = const std::array<LinearKernel, 3>*;  // by DType

std::vector<Versions<Kernels>::Version> usable() {
  std::vector<Versions<Kernels>::Version> usable = {{"portable", &linear_portable::kKernels}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", &linear_x86_64_v3::kKernels});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", &linear_x86_64_v4::kKernels});
    if (__builtin_cpu_supports("avx512bf16")) usable.push_back({"avx512-bf16", &linear_avx512_bf16::kKernels});
  }
#endif
  return usable;
}

Versions<Kernels> versions("linear", usable());

constexpr std::int64_t kAlignment = 64;

}  // namespace

void linear(const LinearArgs& args) {
  const LinearKernel& kernel = (*versions.chosen())[static_cast<std::size_t>(args.dtype)];
  const std::int64_t padded = (args.in_features + kernel.step - 1) / kernel.step * kernel.step;
  const std::unique_ptr<char[]> inputs(new char[static_cast<std::size_t>(args.num_rows * padded * kernel.input_size)]);
  kernel.prepare(args, inputs.get(), padded);
  // Each thread's own, a multiple of the largest vector long.
  const std::int64_t bytes = (kernel.buffer_bytes(args, padded) + kAlignment - 1) / kAlignment * kAlignment;
  const std::unique_ptr<char[]> buffers(new char[static_cast<std::size_t>(bytes * args.num_threads + kAlignment)]);
  char* aligned = buffers.get() + (-reinterpret_cast<std::intptr_t>(buffers.get()) & (kAlignment - 1));
  // Waking a thread costs some microseconds, about what a core multiplies 64K numbers in.
  const bool worth_threads = args.num_rows * args.in_features * args.out_features > (1 << 18);
#pragma omp parallel for num_threads(args.num_threads) if (worth_threads) schedule(static)
  for (int part = 0; part < args.num_threads; ++part) {
    const std::int64_t begin = args.out_features * part / args.num_threads;
    kernel.outputs(args, inputs.get(), padded, begin, args.out_features * (part + 1) / args.num_threads,
                   aligned + part * bytes);
  }
}

std::vector<std::string> linear_versions() { return versions.names(); }

void choose_linear_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
