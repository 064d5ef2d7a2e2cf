// The keyed noise of sampling: philox.h, by seed, position and token.
#pragma once

#include <cstdint>

#include "kernels/philox.h"

namespace specdec {

constexpr int kNoiseBlock = 256;  // tokens whose random words are computed together

// The noise of one position; every counter gives the words of four tokens.
struct Noise {
  std::uint32_t position_low;
  std::uint32_t position_high;
  PhiloxKey key;
};

Noise noise_of(std::int64_t seed, std::int64_t position);

// The noise of one token.
double noise_at(const Noise& noise, std::int64_t token);

// The smallest word whose noise reaches `wanted`, or a slightly smaller one.
std::uint32_t smallest_word(double wanted);

// Word w of counter `first + i`, which belongs to token 4 * (first + i) + w, at words[w][i].
void random_words(const Noise& noise, std::uint32_t first, int num_counters, std::uint32_t words[4][kNoiseBlock / 4]);

}  // namespace specdec
