// noise_words: the random words from which the noise of a few tokens is computed.
// specdec_fast/ops/noise_words.py states the contract.
#pragma once

#include <cstdint>

namespace specdec {

struct NoiseWordsArgs {
  const std::int64_t* token_ids;  // [num_rows, num_tokens], contiguous
  std::int64_t num_rows;
  std::int64_t num_tokens;
  const std::int64_t* seeds;      // [num_rows]
  const std::int64_t* positions;  // [num_rows]
  std::int64_t* words;            // [num_rows, num_tokens], contiguous
};

void noise_words(const NoiseWordsArgs& args);

}  // namespace specdec
