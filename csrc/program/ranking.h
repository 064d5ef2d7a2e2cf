// The likeliest next tokens of a drafter's rows, with the probability that each is the target's.
// specdec_fast/drafters/ranked.py states the rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program/draft_rows.h"

namespace specdec {

struct RankedToken {
  std::int64_t token;  // the target's id
  double log_prob;     // that it is the target's if all before it are; -inf or NaN: there is no such token
};

class Ranker {
 public:
  // `choice` may have no penalties. `greedy_temperature`: of the probabilities of requests that do not sample.
  Ranker(const Choice& choice, double greedy_temperature, int num_threads)
      : choice_(choice), greedy_temperature_(greedy_temperature), num_threads_(num_threads) {}

  // Ranks the next tokens of rows.
  //   logits: [members.size(), width].
  //   members: the sequence of each row.
  //   ahead: number of tokens drafted before, on the path of each row.
  // Returns [members.size(), num_ranks], the likeliest first, in memory that the next call uses again.
  const std::vector<RankedToken>& rank(const char* logits, const std::vector<std::size_t>& members, std::int64_t ahead,
                                       std::int64_t num_ranks);

 private:
  void rank_by_logits(const char* logits, std::int64_t num_ranks, RankedToken* to) const;
  void rank_by_draws(const char* logits, std::size_t member, std::int64_t ahead, std::int64_t num_ranks,
                     RankedToken* to) const;

  Choice choice_;
  double greedy_temperature_;
  int num_threads_;
  std::vector<RankedToken> ranked_;
};

}  // namespace specdec
