#include "program/drafting.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "kernels/conversions.h"
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
            seeds_.data(),        positions_.data(), nullptr, cu_seen_.data()};
  }

 private:
  std::vector<double> temperatures_, top_p_, min_p_, penalties_;
  std::vector<std::int32_t> top_k_, cu_seen_;
  std::vector<std::int64_t> seeds_, positions_;
};

// Logits over the target's vocabulary: those of the drafter's ids at the target's, all others -inf.
class WideLogits {
 public:
  WideLogits(const Choice& choice, std::size_t num_rows) : choice_(choice), item_(item_size(choice.dtype)) {
    const float least = -std::numeric_limits<float>::infinity();
    narrow_all(choice.dtype, &least, nothing_, 1);
    numbers_.resize(num_rows * static_cast<std::size_t>(choice.num_target_ids * item_));
    for (std::size_t i = 0; i < numbers_.size(); i += item_) std::memcpy(numbers_.data() + i, nothing_, item_);
  }

  // Every call writes the same places of a row, so the others stay as they are.
  const void* spread(const char* logits, std::size_t num_rows) {
    for (std::size_t row = 0; row < num_rows; ++row) {
      char* to = numbers_.data() + row * static_cast<std::size_t>(choice_.num_target_ids * item_);
      const char* from = logits + row * static_cast<std::size_t>(choice_.width * item_);
      for (std::int64_t id = 0; id < choice_.vocab_size; ++id) {
        std::memcpy(to + choice_.target_ids[id] * item_, from + id * item_, item_);
      }
    }
    return numbers_.data();
  }

 private:
  Choice choice_;
  std::size_t item_;
  char nothing_[sizeof(float)];
  std::vector<char> numbers_;
};

// The row that each sequence's next forward takes, from the hidden states of the last one.
class Carried {
 public:
  Carried(const CarriedRows& rows, std::size_t num_sequences, int num_threads)
      : rows_(rows), next_(num_sequences * static_cast<std::size_t>(rows.row_bytes)), inputs_(rows.first) {
    if (rows.projection != nullptr) project(num_threads);
  }

  // Gives a forward its inputs, and memory for its hidden states.
  void set(Forward& forward) {
    if (rows_.row_bytes == 0) return;
    hidden_.resize(std::max(hidden_.size(), static_cast<std::size_t>(forward.num_rows * rows_.row_bytes)));
    forward.inputs = inputs_;
    forward.hidden_states = hidden_.data();
  }

  // Row `row` of the last forward is the input of row `next` of the following one.
  void keep(std::int64_t row, std::size_t next) {
    if (rows_.row_bytes == 0) return;
    const auto bytes = static_cast<std::size_t>(rows_.row_bytes);
    std::memcpy(next_.data() + next * bytes, hidden_.data() + static_cast<std::size_t>(row) * bytes, bytes);
    inputs_ = next_.data();
  }

 private:
  void project(int num_threads) {
    std::vector<char> taken;
    for (const auto& [piece, count] : rows_.pieces) taken.insert(taken.end(), piece, piece + count * rows_.input_bytes);
    std::vector<std::int64_t> all(taken.size() / static_cast<std::size_t>(rows_.input_bytes));
    std::iota(all.begin(), all.end(), 0);
    projected_.resize(all.size() * static_cast<std::size_t>(rows_.row_bytes));
    Forward forward{};
    forward.num_rows = forward.num_logit_rows = static_cast<std::int64_t>(all.size());
    forward.token_ids = forward.positions = forward.logit_rows = all.data();  // of these it reads the last one alone
    forward.logits = projected_.data();
    forward.num_threads = num_threads;
    forward.inputs = taken.data();
    rows_.projection->run(forward);
    inputs_ = projected_.data();
  }

  const CarriedRows& rows_;
  std::vector<char> next_, hidden_, projected_;
  const char* inputs_;
};

void check(const DraftRequest& request, const Choice& choice) {
  if (choice.vocab_size < 1 || choice.vocab_size > choice.width) {
    throw std::invalid_argument("tokens are chosen from " + std::to_string(choice.vocab_size) + " ids, but a row has " +
                                std::to_string(choice.width) + " logits");
  }
  if (request.carried.projection != nullptr && request.carried.input_bytes < 1) {
    throw std::invalid_argument("a projection takes rows of " + std::to_string(request.carried.input_bytes) +
                                " bytes; expected at least 1");
  }
  for (std::int64_t id = 0; choice.target_ids != nullptr && id < choice.vocab_size; ++id) {
    if (choice.target_ids[id] >= 0 && choice.target_ids[id] < choice.num_target_ids) continue;
    throw std::out_of_range("draft id " + std::to_string(id) + " stands for " + std::to_string(choice.target_ids[id]) +
                            "; the target has " + std::to_string(choice.num_target_ids) + " ids");
  }
  std::int64_t num_rows = 0;
  for (const Span& span : request.spans) num_rows += span.count;
  const CarriedRows& carried = request.carried;
  std::int64_t num_carried = 0;
  for (const auto& piece : carried.pieces) num_carried += piece.second;
  const bool fits = static_cast<std::size_t>(num_rows) == request.token_ids.size() &&
                    request.spans.size() == request.num_draft_tokens.size() &&
                    (carried.projection == nullptr || num_carried == num_rows);
  const auto positive = [](std::int64_t count) { return count > 0; };
  if (!fits || !std::all_of(request.num_draft_tokens.begin(), request.num_draft_tokens.end(), positive)) {
    throw std::invalid_argument("a draft of " + std::to_string(request.spans.size()) + " spans of " +
                                std::to_string(num_rows) + " rows has " + std::to_string(request.token_ids.size()) +
                                " tokens and " + std::to_string(request.num_draft_tokens.size()) +
                                " counts, of which each must be at least 1");
  }
}

}  // namespace

void draft(Program& program, const Pages& pages, const DraftRequest& request, const Choice& choice, int num_threads,
           std::int64_t* chosen) {
  check(request, choice);
  const std::vector<std::int64_t>& counts = request.num_draft_tokens;
  const std::size_t num_sequences = counts.size();
  const std::unique_ptr<char[]> logits(
      new char[num_sequences * static_cast<std::size_t>(choice.width * item_size(choice.dtype))]);
  const bool is_wide = choice.target_ids != nullptr && choice.sampling != nullptr;
  const std::unique_ptr<WideLogits> wide = is_wide ? std::make_unique<WideLogits>(choice, num_sequences) : nullptr;
  Carried carried(request.carried, num_sequences, num_threads);
  std::vector<std::int64_t> first(num_sequences + 1);  // index of each sequence's first token
  std::partial_sum(counts.begin(), counts.end(), first.begin() + 1);
  std::vector<std::int32_t> one_each(num_sequences + 1), accepted(num_sequences);
  std::iota(one_each.begin(), one_each.end(), 0);
  std::vector<std::int64_t> tokens(num_sequences), next(num_sequences), fed;
  std::vector<std::size_t> members(num_sequences);
  std::iota(members.begin(), members.end(), 0);
  std::vector<Span> spans = request.spans;
  const std::int64_t* token_ids = request.token_ids.data();

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
                  wide ? choice.num_target_ids : choice.vocab_size, wide ? choice.num_target_ids : choice.width, token_ids,
                  one_each.data(), num_members, rules ? &sampling : nullptr, num_threads},
                 {tokens.data(), accepted.data(), next.data()});
    std::vector<std::size_t> going_on;
    std::vector<Span> after;
    fed.clear();
    for (std::size_t i = 0; i < members.size(); ++i) {
      const std::size_t b = members[i];
      std::int64_t token = std::max<std::int64_t>(tokens[i], 0);
      if (choice.target_ids != nullptr && !wide) token = choice.target_ids[token];
      chosen[first[b] + ahead] = token;
      if (ahead + 1 == counts[b]) continue;
      carried.keep(layout.cu_seqlens()[i + 1] - 1, going_on.size());
      going_on.push_back(b);
      after.push_back({spans[i].place, spans[i].start + spans[i].count, 1});
      fed.push_back(token);
    }
    members.swap(going_on);
    spans.swap(after);
    token_ids = fed.data();
  }
}

}  // namespace specdec
