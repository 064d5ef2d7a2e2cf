// Element types of the tensors that Python passes, and their conversions to and from fp32. These use integer arithmetic
// alone, so that every conversion vectorises on any instruction set and none depends on a compiler's half type.
#pragma once

#include <cstdint>
#include <cstring>

namespace specdec {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

inline std::int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }  // bytes

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Float32 {
  using Storage = float;
  static constexpr std::uint32_t kInfinity = 0x7f800000u;  // its bits
  static inline float load(float x) { return x; }
  static inline float store(float x) { return x; }
};

struct BFloat16 {
  using Storage = std::uint16_t;
  static constexpr std::uint16_t kInfinity = 0x7f80u;
  static inline float load(std::uint16_t bits) { return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static inline std::uint16_t store(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
    return static_cast<std::uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16);
  }
};

struct Float16 {
  using Storage = std::uint16_t;
  static constexpr std::uint16_t kInfinity = 0x7c00u;
  static inline float load(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7fffu;
    // The fp16 exponent, read as an fp32 one, is 112 too small; the product also normalises subnormals.
    const float scaled = bit_cast<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
    return bit_cast<float>(bit_cast<std::uint32_t>(scaled) | special | (static_cast<std::uint32_t>(half & 0x8000u) << 16));
  }
  static inline std::uint16_t store(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const float magnitude = bit_cast<float>(bits & 0x7fffffffu);
    if (!(magnitude < 65520.0f)) {  // rounds to infinity, or is a NaN
      return static_cast<std::uint16_t>(sign | (x != x ? 0x7e00u : 0x7c00u));
    }
    if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 leaves the rounded value in the lowest bits
      return static_cast<std::uint16_t>(sign | (bit_cast<std::uint32_t>(magnitude + 0.5f) - 0x3f000000u));
    }
    const std::uint32_t m = bits & 0x7fffffffu;
    return static_cast<std::uint16_t>(sign | ((m - (112u << 23) + 0xfffu + ((m >> 13) & 1)) >> 13));
  }
};

}  // namespace specdec
