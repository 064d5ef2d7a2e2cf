// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cmath>
#include <cstdint>

namespace specdec {

struct PhiloxKey {
  std::uint32_t low;
  std::uint32_t high;
};

// Replaces the four 32-bit words of a counter by random ones. There is no branch, so that a loop over counters vectorises.
inline __attribute__((always_inline)) void philox4x32(std::uint32_t& c0, std::uint32_t& c1, std::uint32_t& c2,
                                                      std::uint32_t& c3, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key.low;
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key.high;
    c1 = static_cast<std::uint32_t>(product1);
    c3 = static_cast<std::uint32_t>(product0);
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
}

// Gumbel noise of one random word: u = (word + 0.5) / 2^32 is never 0 or 1, so -log(-log(u)) is finite.
inline double gumbel(std::uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -std::log(-std::log(uniform));
}

constexpr double kLargestNoise = 22.88;  // above the noise of the largest word, log(2^33) = 22.87

}  // namespace specdec
