// All forwards of a draft model, or of a drafter's layers, in one step, in one call, whatever each sequence's number of
// draft tokens.
#pragma once

#include <cstdint>
#include <utility>
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
  // If the drafter has a vocabulary of its own, the target's id of each of its `vocab_size` ids: different ids below
  // `num_target_ids`. Noise belongs to the target's ids. Null: they are the same. A verification has none.
  const std::int64_t* target_ids = nullptr;
  std::int64_t num_target_ids = 0;
};

// The rows that a program takes beside its tokens. The program's hidden states have the same size: those of a sequence's
// last row are the input of its next one.
struct CarriedRows {
  const char* first = nullptr;  // of the first forward's rows
  std::int64_t row_bytes = 0;   // 0: the program takes none
  // If not null, the first forward's rows are the logits of this program, which has no KV entries and reads neither tokens
  // nor positions.
  Program* projection = nullptr;
  std::int64_t input_bytes = 0;                                // of a row that it takes, at least 1
  std::vector<std::pair<const char*, std::int64_t>> pieces{};  // address and number of such rows
};

// The sequences to draft for.
struct DraftRequest {
  std::vector<Span> spans;                     // rows of the first forward; the draft tokens of a sequence follow its span
  std::vector<std::int64_t> token_ids;         // tokens of the spans, sequence after sequence
  std::vector<std::int64_t> num_draft_tokens;  // per sequence, at least 1
  CarriedRows carried = {};
};

// Forward i computes one row for every sequence that gets more than i draft tokens: the token that forward i - 1 chose.
// `choice` may have no penalties. The token ids that it writes and feeds are the target's. Writes num_draft_tokens[b]
// tokens, sequence after sequence; logits with a NaN choose token 0.
// Throws std::invalid_argument if the parts of `request` or `choice` do not fit together.
void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen);

}  // namespace specdec
