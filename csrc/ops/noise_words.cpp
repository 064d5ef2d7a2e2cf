#include "ops/noise_words.h"

#include "kernels/philox.h"

namespace specdec {

// One thread: a word takes some 10 ns, and there are a few hundred tokens.
void noise_words(const NoiseWordsArgs& args) {
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const auto seed = static_cast<std::uint64_t>(args.seeds[row]);
    const auto position = static_cast<std::uint64_t>(args.positions[row]);
    const PhiloxKey key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    for (std::int64_t i = row * args.num_tokens; i < (row + 1) * args.num_tokens; ++i) {
      const auto token = static_cast<std::uint64_t>(args.token_ids[i]);
      std::uint32_t words[4] = {static_cast<std::uint32_t>(token / 4), static_cast<std::uint32_t>(position),
                                static_cast<std::uint32_t>(position >> 32), 0};
      philox4x32(words[0], words[1], words[2], words[3], key);
      args.words[i] = words[token % 4];
    }
  }
}

}  // namespace specdec
