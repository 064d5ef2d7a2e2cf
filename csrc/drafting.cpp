#include "drafting.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "verify_chain.h"

namespace specdec {

void draft(Program& program, std::vector<Forward> forwards, const Choice& choice, std::int64_t* chosen) {
  const std::int64_t num_sequences = forwards.front().num_logit_rows;
  const std::unique_ptr<char[]> logits(
      new char[static_cast<std::size_t>(num_sequences * choice.width * item_size(choice.dtype))]);
  std::vector<std::int32_t> one_each(static_cast<std::size_t>(num_sequences) + 1), accepted(one_each.size());
  std::iota(one_each.begin(), one_each.end(), 0);
  std::vector<std::int64_t> next(one_each.size()), positions(one_each.size());
  Sampling sampling{};
  if (choice.sampling != nullptr) {
    sampling = *choice.sampling;
    std::copy(sampling.positions, sampling.positions + num_sequences, positions.begin());
    sampling.positions = positions.data();
  }
  for (Forward& forward : forwards) {
    forward.logits = logits.get();
    program.run(forward);
    // What was fed decides nothing here but penalties, of which there are none.
    verify_chain({logits.get(), choice.dtype, num_sequences, choice.vocab_size, choice.width, forward.token_ids,
                  one_each.data(), num_sequences, choice.sampling == nullptr ? nullptr : &sampling, forward.num_threads},
                 {chosen, accepted.data(), next.data()});
    for (std::int64_t i = 0; i < num_sequences; ++i) {
      chosen[i] = std::max<std::int64_t>(chosen[i], 0);
      ++positions[static_cast<std::size_t>(i)];
    }
    chosen += num_sequences;
  }
}

}  // namespace specdec
