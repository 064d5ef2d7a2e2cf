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
  const SpanLayout layout(pages, request.spans, SpanLayout::Logits::kAllRows);
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
  std::vector<std::int32_t> num_accepted(num_sequences);
  verify_chain({logits, choice.dtype, layout.num_rows(), choice.vocab_size, choice.width, token_ids.data(),
                layout.cu_seqlens(), static_cast<std::int64_t>(num_sequences), choice.sampling, num_threads},
               {target_tokens.data(), num_accepted.data(), next_tokens.data()});
  std::vector<std::vector<std::int64_t>> emissions(num_sequences);
  for (std::size_t b = 0; b < num_sequences; ++b) {
    const std::int64_t* own = target_tokens.data() + layout.cu_seqlens()[b];
    emissions[b].assign(own, own + num_accepted[b]);
    emissions[b].push_back(next_tokens[b]);
  }
  return {std::move(emissions), std::chrono::duration<double>(std::chrono::steady_clock::now() - computed).count()};
}

}  // namespace specdec
