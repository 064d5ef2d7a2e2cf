// All forwards of a draft model, or of a drafter's layers, in one step, in one call, whatever each sequence's number of
// draft tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "program/draft_rows.h"
#include "program/program.h"
#include "program/spans.h"

namespace specdec {

// The sequences to draft for.
struct DraftRequest {
  std::vector<Span> spans;                     // rows of the first forward; the draft tokens of a sequence follow its span
  std::vector<std::int64_t> token_ids;         // tokens of the spans, sequence after sequence
  std::vector<std::int64_t> num_draft_tokens;  // per sequence, at least 1
  CarriedRows carried = {};
};

// Throws std::invalid_argument or std::out_of_range if the parts of `request` or `choice` do not fit together.
void check(const DraftRequest& request, const Choice& choice);

// Forward i computes one row for every sequence that gets more than i draft tokens: the token that forward i - 1 chose.
// `choice` may have no penalties. The token ids that it writes and feeds are the target's. Writes num_draft_tokens[b]
// tokens, sequence after sequence; logits with a NaN choose token 0.
void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen);

}  // namespace specdec
