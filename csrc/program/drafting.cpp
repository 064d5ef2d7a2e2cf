#include "program/drafting.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "ops/verify_chain.h"

namespace specdec {

namespace {

// The sampling parameters of the sequences that are still drafting, as arrays of their own.
class Rules {
 public:
  Rules(const Sampling& all, const std::vector<std::size_t>& members, std::int64_t ahead) : cu_seen_(members.size() + 1) {
    for (const std::size_t b : members) {
      temperatures_.push_back(all.temperatures[b]);
      top_k_.push_back(all.top_k[b]);
      top_p_.push_back(all.top_p[b]);
      min_p_.push_back(all.min_p[b]);
      penalties_.push_back(1.0);
      seeds_.push_back(all.seeds[b]);
      positions_.push_back(all.positions[b] + ahead);
    }
  }

  Sampling sampling() const {
    return {temperatures_.data(), top_k_.data(), top_p_.data(),     min_p_.data(), penalties_.data(),
            seeds_.data(),        positions_.data(), nullptr,           cu_seen_.data()};
  }

 private:
  std::vector<double> temperatures_, top_p_, min_p_, penalties_;
  std::vector<std::int32_t> top_k_, cu_seen_;
  std::vector<std::int64_t> seeds_, positions_;
};

}  // namespace

void check(const DraftRequest& request, const Choice& choice) {
  check(choice);
  std::int64_t num_rows = 0;
  for (const Span& span : request.spans) num_rows += span.count;
  check(request.carried, num_rows);
  const bool fits = static_cast<std::size_t>(num_rows) == request.token_ids.size() &&
                    request.spans.size() == request.num_draft_tokens.size();
  const auto positive = [](std::int64_t count) { return count > 0; };
  if (!fits || !std::all_of(request.num_draft_tokens.begin(), request.num_draft_tokens.end(), positive)) {
    throw std::invalid_argument("a draft of " + std::to_string(request.spans.size()) + " spans of " +
                                std::to_string(num_rows) + " rows has " + std::to_string(request.token_ids.size()) +
                                " tokens and " + std::to_string(request.num_draft_tokens.size()) +
                                " counts, of which each must be at least 1");
  }
}

void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen) {
  check(request, choice);
  const std::vector<std::int64_t>& counts = request.num_draft_tokens;
  const std::size_t num_sequences = counts.size();
  const std::unique_ptr<char[]> logits(
      new char[num_sequences * static_cast<std::size_t>(choice.width * item_size(choice.dtype))]);
  const bool is_wide = choice.target_ids != nullptr && (choice.sampling != nullptr || choice.drafter_ids != nullptr);
  const std::int64_t num_choosable = choice.drafter_ids != nullptr ? choice.num_choosable : choice.num_target_ids;
  const std::unique_ptr<WideLogits> wide = is_wide ? std::make_unique<WideLogits>(choice, num_sequences) : nullptr;
  Carried carried(request.carried, num_threads);
  std::vector<std::int64_t> first(num_sequences + 1);  // index of each sequence's first token
  std::partial_sum(counts.begin(), counts.end(), first.begin() + 1);
  std::vector<std::int32_t> one_each(num_sequences + 1), accepted(num_sequences);
  std::iota(one_each.begin(), one_each.end(), 0);
  std::vector<std::int64_t> tokens(num_sequences), next(num_sequences), fed;
  std::vector<std::size_t> members(num_sequences);
  std::iota(members.begin(), members.end(), 0);
  std::vector<Span> spans = request.spans;
  const std::int64_t* token_ids = request.token_ids.data();
  std::vector<char> kept;  // hidden states of each sequence's last row

  for (std::int64_t ahead = 0; !members.empty(); ++ahead) {
    const SpanLayout layout(pages, spans, SpanLayout::Logits::kLastRows);
    Forward forward = layout.forward(token_ids, logits.get(), num_threads);
    carried.set(forward);
    program.run(forward);
    Sampling sampling{};
    std::unique_ptr<Rules> rules;
    if (choice.sampling != nullptr) {
      rules = std::make_unique<Rules>(*choice.sampling, members, ahead);
      sampling = rules->sampling();
    }
    const auto num_members = static_cast<std::int64_t>(members.size());
    // The input tokens matter for penalties only, and there are none.
    verify_chain({wide ? wide->spread(logits.get(), members.size()) : logits.get(), choice.dtype, num_members,
                  wide ? num_choosable : choice.vocab_size, wide ? choice.num_target_ids : choice.width, token_ids,
                  one_each.data(), num_members, rules ? &sampling : nullptr, num_threads},
                 {tokens.data(), accepted.data(), next.data()});
    std::vector<std::size_t> going_on;
    std::vector<Span> after;
    kept.clear();
    fed.clear();
    for (std::size_t i = 0; i < members.size(); ++i) {
      const std::size_t b = members[i];
      std::int64_t token = std::max<std::int64_t>(tokens[i], 0);
      if (choice.target_ids != nullptr && !wide) token = choice.target_ids[token];
      chosen[first[b] + ahead] = token;
      if (ahead + 1 == counts[b]) continue;
      const char* hidden = carried.hidden(static_cast<std::size_t>(layout.cu_seqlens()[i + 1] - 1));
      kept.insert(kept.end(), hidden, hidden + carried.row_bytes());
      going_on.push_back(b);
      after.push_back(spans[i].behind());
      fed.push_back(choice.drafter_ids != nullptr ? choice.drafter_ids[token] : token);
    }
    members.swap(going_on);
    spans.swap(after);
    token_ids = fed.data();
    carried.take(kept);
  }
}

}  // namespace specdec
