// The verification of one step: the target's forward over the last committed token and the draft tokens of every sequence,
// and which draft tokens it accepts.
#pragma once

#include <cstdint>
#include <vector>

#include "program/drafting.h"
#include "program/program.h"
#include "program/spans.h"

namespace specdec {

// Per sequence a span of `count` rows: its last committed token and its `count - 1` draft tokens.
struct VerifyRequest {
  std::vector<Span> spans;
  std::vector<std::int64_t> last_tokens;
  const std::int64_t* draft_tokens;  // sequence after sequence; ids outside the vocabulary are clamped
  std::int64_t num_draft_tokens;
  const std::int32_t* parents;  // [num_draft_tokens], see SpanLayout; null: chains
};

struct Verified {
  // Per sequence: its accepted draft tokens and the target's own next token, or -1 where the logits have a NaN.
  std::vector<std::vector<std::int64_t>> emissions;
  // Per sequence: the rows of its accepted draft tokens, counted from its first row. Empty without trees.
  std::vector<std::vector<std::int32_t>> paths;
  double seconds;  // time to choose the tokens, after the forward
};

// Writes the logits of all rows, [rows, width], and their hidden states if the program computes some. Throws
// std::invalid_argument if the request's parts do not fit together.
Verified verify(Program& program, const Pages& pages, const VerifyRequest& request, const Choice& choice, int num_threads,
                void* logits, void* hidden_states);

}  // namespace specdec
