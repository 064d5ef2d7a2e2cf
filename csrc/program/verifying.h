// A step's verification: the target's forward over every sequence's last token and draft, and what it accepts of them.
#pragma once

#include <cstdint>
#include <vector>

#include "program/drafting.h"
#include "program/program.h"
#include "program/spans.h"

namespace specdec {

// Per sequence: a span of `count` rows, fed its last committed token and its next `count - 1` draft tokens.
struct VerifyRequest {
  std::vector<Span> spans;
  std::vector<std::int64_t> last_tokens;
  const std::int64_t* draft_tokens;  // sequence after sequence; one that is no word is fed as the nearest one
  std::int64_t num_draft_tokens;
};

struct Verified {
  // Of each sequence: its accepted draft tokens and the target's own next token, -1 where its logits have a NaN.
  std::vector<std::vector<std::int64_t>> emissions;
  double seconds;  // that choosing them took, once the logits were there
};

// Writes the logits of all rows, [rows, width]. Throws std::invalid_argument if the request's parts do not fit together.
Verified verify(Program& program, const Pages& pages, const VerifyRequest& request, const Choice& choice, int num_threads,
                void* logits);

}  // namespace specdec
