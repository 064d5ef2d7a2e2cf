#include "ops/sampling_noise.h"

#include <algorithm>
#include <cmath>

#include "kernels/multiversion.h"

namespace specdec {

Noise noise_of(std::int64_t seed, std::int64_t position) {
  const auto place = static_cast<std::uint64_t>(position);
  const auto key = static_cast<std::uint64_t>(seed);
  return {static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32),
          {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)}};
}

double noise_at(const Noise& noise, std::int64_t token) {
  std::uint32_t words[4] = {static_cast<std::uint32_t>(token / 4), noise.position_low, noise.position_high, 0};
  philox4x32(words[0], words[1], words[2], words[3], noise.key);
  return gumbel(words[token % 4]);
}

// -log(-log(u)) >= wanted, solved for u.
std::uint32_t smallest_word(double wanted) {
  const double word = std::exp(-std::exp(-wanted)) * 0x1p32 - 2.0;
  return word > 0.0 ? static_cast<std::uint32_t>(std::min(word, 0x1.fffffffcp31)) : 0u;
}

SPECDEC_MULTIVERSION
void random_words(const Noise& noise, std::uint32_t first, int num_counters, std::uint32_t words[4][kNoiseBlock / 4]) {
  for (int i = 0; i < num_counters; ++i) {
    std::uint32_t c0 = first + static_cast<std::uint32_t>(i), c1 = noise.position_low, c2 = noise.position_high, c3 = 0;
    philox4x32(c0, c1, c2, c3, noise.key);
    words[0][i] = c0;
    words[1][i] = c1;
    words[2][i] = c2;
    words[3][i] = c3;
  }
}

}  // namespace specdec
