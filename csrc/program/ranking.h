// The likeliest next tokens of a drafter's rows, with the probability that each is the target's.
// specdec_fast/drafters/shared/ranked.py states the rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "program/draft_rows.h"

namespace specdec {

struct RankedToken {
  std::int64_t token;  // the target's id
  double log_prob;     // that it is the target's, given that all tokens before it are; -inf or NaN: there is no such token
};

class Ranker {
 public:
  // `choice` may have no penalties. `greedy_temperature`: of the probabilities of requests that do not sample.
  Ranker(const Choice& choice, double greedy_temperature, int num_threads)
      : choice_(choice),
        greedy_temperature_(greedy_temperature),
        num_threads_(num_threads),
        scratch_(static_cast<std::size_t>(num_threads)) {}

  // Ranks the next tokens of rows.
  //   logits: [members.size(), width].
  //   members: the sequence of each row.
  //   ahead: number of tokens drafted before, on the path of each row.
  //   num_ranks: at least 1.
  // Returns [members.size(), num_ranks], the likeliest first, in memory that the next call uses again.
  const std::vector<RankedToken>& rank(const char* logits, const std::vector<std::size_t>& members, std::int64_t ahead,
                                       std::int64_t num_ranks);

 private:
  struct Row {
    std::size_t member;
    std::int64_t ahead, num_ranks;
  };

  // Memory of one thread, for all rows: a row of 150,000 ids takes some megabytes.
  struct Scratch {
    std::vector<float> numbers;
    std::vector<double> sampled;
    std::optional<WideLogits> wide;
  };

  void make_room(std::size_t num_threads);
  void rank_by_logits(const char* logits, std::int64_t num_ranks, Scratch& scratch, RankedToken* to) const;
  void rank_by_draws(const char* logits, const Row& row, Scratch& scratch, RankedToken* to) const;

  Choice choice_;
  double greedy_temperature_;
  int num_threads_;
  std::vector<Scratch> scratch_;
  std::vector<RankedToken> ranked_;
};

}  // namespace specdec
