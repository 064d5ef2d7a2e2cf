#include "program/verifying.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops/verify_chain.h"

namespace specdec {

namespace {

void check(const VerifyRequest& request) {
  std::int64_t num_rows = 0;
  for (const Span& span : request.spans) num_rows += span.count;
  const std::size_t num_sequences = request.spans.size();
  if (request.last_tokens.size() != num_sequences ||
      num_rows != static_cast<std::int64_t>(num_sequences) + request.num_draft_tokens) {
    throw std::invalid_argument("a verification of " + std::to_string(num_sequences) + " spans of " +
                                std::to_string(num_rows) + " rows has " + std::to_string(request.last_tokens.size()) +
                                " last tokens and " + std::to_string(request.num_draft_tokens) + " draft tokens");
  }
}

}  // namespace

Verified verify(Program& program, const Pages& pages, const VerifyRequest& request, const Choice& choice, int num_threads,
                void* logits, void* hidden_states) {
  check(request);
  const SpanLayout layout(pages, request.spans, SpanLayout::Logits::kAllRows, request.parents);
  const std::size_t num_sequences = request.spans.size();
  const std::int64_t* drafted = request.draft_tokens;
  std::vector<std::int64_t> token_ids;
  token_ids.reserve(static_cast<std::size_t>(layout.num_rows()));
  for (std::size_t b = 0; b < num_sequences; ++b) {
    token_ids.push_back(request.last_tokens[b]);
    for (std::int64_t i = 1; i < request.spans[b].count; ++i) {
      token_ids.push_back(std::clamp<std::int64_t>(*drafted++, 0, choice.width - 1));
    }
  }
  Forward forward = layout.forward(token_ids.data(), logits, num_threads);
  forward.hidden_states = hidden_states;
  program.run(forward);
  const auto computed = std::chrono::steady_clock::now();

  std::vector<std::int64_t> target_tokens(token_ids.size()), next_tokens(num_sequences);
  std::vector<std::int32_t> num_accepted(num_sequences), accepted_rows(request.parents ? token_ids.size() : 0);
  verify_chain({logits, choice.dtype, layout.num_rows(), choice.vocab_size, choice.width, token_ids.data(),
                layout.cu_seqlens(), static_cast<std::int64_t>(num_sequences), choice.sampling, num_threads,
                layout.row_parents()},
               {target_tokens.data(), num_accepted.data(), next_tokens.data(), accepted_rows.data()});
  std::vector<std::vector<std::int64_t>> emissions(num_sequences);
  std::vector<std::vector<std::int32_t>> paths(request.parents ? num_sequences : 0);
  for (std::size_t b = 0; b < num_sequences; ++b) {
    const std::int32_t first = layout.cu_seqlens()[b];
    if (request.parents) {  // a draft token on the path is what the target chose at its parent
      paths[b].assign(accepted_rows.data() + first, accepted_rows.data() + first + num_accepted[b]);
      for (const std::int32_t row : paths[b]) emissions[b].push_back(token_ids[first + row]);
    } else {
      emissions[b].assign(target_tokens.data() + first, target_tokens.data() + first + num_accepted[b]);
    }
    emissions[b].push_back(next_tokens[b]);
  }
  const std::chrono::duration<double> chosen = std::chrono::steady_clock::now() - computed;
  return {std::move(emissions), std::move(paths), chosen.count()};
}

}  // namespace specdec
