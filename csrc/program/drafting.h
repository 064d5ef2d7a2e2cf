// A draft model's forwards of a step: one call, whatever each sequence's number of draft tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/sampling.h"
#include "program/program.h"
#include "program/spans.h"

namespace specdec {

// How tokens are chosen from logits.
struct Choice {
  DType dtype;               // of the logits
  std::int64_t width;        // of the logits
  std::int64_t vocab_size;   // ids that may be chosen, at most `width`
  const Sampling* sampling;  // null: greedy; positions are those of the first forward
};

// What is drafted for: sequence after sequence.
struct DraftRequest {
  std::vector<Span> spans;                     // computed first; each is followed by the sequence's own draft tokens
  std::vector<std::int64_t> token_ids;         // of the spans
  std::vector<std::int64_t> num_draft_tokens;  // of each, at least 1
};

// Forward i computes a row of every sequence that gets more than i draft tokens, fed what forward i - 1 chose. `choice`
// may have no penalties. Writes num_draft_tokens[b] tokens of sequence after sequence; logits with a NaN choose token 0.
// Throws std::invalid_argument if the request's parts do not fit together.
void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen);

}  // namespace specdec
