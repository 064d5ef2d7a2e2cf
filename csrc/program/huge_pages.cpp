#include "program/huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>

#include <fstream>
#include <string>
#endif

namespace specdec {

#ifdef __linux__

namespace {

constexpr std::uintptr_t kHugePage = 1 << 21;  // bytes: on x86-64, and on ARM with small pages of 4 KiB
constexpr int kCollapse = 25;                  // MADV_COLLAPSE (Linux 6.1), which older headers lack

// MADV_COLLAPSE does not read this setting itself on every kernel.
bool are_permitted() {
  std::string setting;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), setting);
  return !setting.empty() && setting.find("[never]") == std::string::npos;
}

}  // namespace

void use_huge_pages(const void* begin, std::int64_t bytes) {
  static const bool permitted = are_permitted();
  if (!permitted || bytes < static_cast<std::int64_t>(kHugePage)) return;
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(begin), end = first + static_cast<std::uintptr_t>(bytes);
  const std::uintptr_t from = (first + kHugePage - 1) / kHugePage * kHugePage, to = end / kHugePage * kHugePage;
  // The first and the last huge page may hold parts of other weights. They are asked for separately, because memory beside
  // the weights that cannot be on huge pages would make Linux refuse everything. Weights on small pages are slower and
  // otherwise the same, so a refusal is no error.
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, kCollapse);
  if (first < from) madvise(reinterpret_cast<void*>(from - kHugePage), kHugePage, kCollapse);
  if (to < end) madvise(reinterpret_cast<void*>(to), kHugePage, kCollapse);
}

#else

void use_huge_pages(const void*, std::int64_t) {}

#endif

}  // namespace specdec
