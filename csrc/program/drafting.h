// All forwards of a draft model in one step, in one call, whatever each sequence's number of draft tokens.
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
  std::int64_t width;        // logits per row
  std::int64_t vocab_size;   // ids that may be chosen, at most `width`
  const Sampling* sampling;  // null: greedy; its positions are those of the first forward
};

// The sequences to draft for.
struct DraftRequest {
  std::vector<Span> spans;                     // rows of the first forward; the draft tokens of a sequence follow its span
  std::vector<std::int64_t> token_ids;         // tokens of the spans, sequence after sequence
  std::vector<std::int64_t> num_draft_tokens;  // per sequence, at least 1
};

// Forward i computes one row for every sequence that gets more than i draft tokens: the token that forward i - 1 chose.
// `choice` may have no penalties. Writes num_draft_tokens[b] tokens, sequence after sequence; logits with a NaN choose
// token 0.
// Throws std::invalid_argument if the request's parts do not fit together.
void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen);

}  // namespace specdec
