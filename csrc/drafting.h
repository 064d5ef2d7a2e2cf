// A draft model's forwards, one after the other, each on the tokens that the one before chose: no Python in between.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"
#include "sampling.h"

namespace specdec {

struct Choice {
  DType dtype;              // of the logits
  std::int64_t width;       // of the logits
  std::int64_t vocab_size;  // ids that may be chosen, at most `width`
  const Sampling* sampling; // null: greedy; positions are those of the first forward. No penalties
};

// Every forward has the same number of logit rows, those of `chosen`; a later one's token_ids are the tokens chosen before
// it. Writes [forwards.size(), num_logit_rows] tokens; logits with a NaN choose token 0.
void draft(Program& program, std::vector<Forward> forwards, const Choice& choice, std::int64_t* chosen);

}  // namespace specdec
