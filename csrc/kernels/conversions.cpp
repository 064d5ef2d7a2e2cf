#include "kernels/conversions.h"

#include <cstring>

#include "kernels/multiversion.h"

namespace specdec {
namespace {

template <typename Format>
SPECDEC_INLINE void widen(const void* from, float* __restrict to, std::int64_t size) {
  const auto* numbers = static_cast<const typename Format::Storage*>(from);
  for (std::int64_t i = 0; i < size; ++i) to[i] = Format::load(numbers[i]);
}
template <typename Format>
SPECDEC_INLINE void narrow(const float* __restrict from, void* to, std::int64_t size) {
  auto* numbers = static_cast<typename Format::Storage*>(to);
  for (std::int64_t i = 0; i < size; ++i) numbers[i] = Format::store(from[i]);
}

SPECDEC_MULTIVERSION
void widen_half(const void* from, float* to, std::int64_t size) { widen<Float16>(from, to, size); }
SPECDEC_MULTIVERSION
void widen_bfloat(const void* from, float* to, std::int64_t size) { widen<BFloat16>(from, to, size); }
SPECDEC_MULTIVERSION
void narrow_half(const float* from, void* to, std::int64_t size) { narrow<Float16>(from, to, size); }
SPECDEC_MULTIVERSION
void narrow_bfloat(const float* from, void* to, std::int64_t size) { narrow<BFloat16>(from, to, size); }

}  // namespace

void widen_all(DType dtype, const void* from, float* to, std::int64_t size) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float)); break;
    case DType::kFloat16: widen_half(from, to, size); break;
    case DType::kBFloat16: widen_bfloat(from, to, size); break;
  }
}

void narrow_all(DType dtype, const float* from, void* to, std::int64_t size) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float)); break;
    case DType::kFloat16: narrow_half(from, to, size); break;
    case DType::kBFloat16: narrow_bfloat(from, to, size); break;
  }
}

}  // namespace specdec
