#include "program/ranking.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/conversions.h"
#include "kernels/largest_places.h"
#include "program/row_functions.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kDrawCost = 8;  // a row that samples takes about as long as 8 greedy rows

}  // namespace

const std::vector<RankedToken>& Ranker::rank(const char* logits, const std::vector<std::size_t>& members,
                                             std::int64_t ahead, std::int64_t num_ranks) {
  const auto num_rows = static_cast<std::int64_t>(members.size());
  const std::int64_t row_bytes = choice_.width * item_size(choice_.dtype);
  ranked_.assign(static_cast<std::size_t>(num_rows * num_ranks), {0, -kInfinity});
  const std::int64_t work = num_rows * choice_.vocab_size * (choice_.sampling == nullptr ? 1 : kDrawCost);
  const int num_threads = num_rows > 1 && work > (1 << 16) ? static_cast<int>(std::min<std::int64_t>(num_threads_, num_rows)) : 1;
  make_room(static_cast<std::size_t>(num_threads));
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::size_t member = members[static_cast<std::size_t>(row)];
    Scratch& scratch = scratch_[static_cast<std::size_t>(omp_get_thread_num())];
    RankedToken* to = ranked_.data() + row * num_ranks;
    if (choice_.sampling != nullptr && choice_.sampling->temperatures[member] > 0.0) {
      rank_by_draws(logits + row * row_bytes, {member, ahead, num_ranks}, scratch, to);
    } else {
      rank_by_logits(logits + row * row_bytes, num_ranks, scratch, to);
    }
  }
  return ranked_;
}

// Before the threads start, because an exception of one of them would end the process.
void Ranker::make_room(std::size_t num_threads) {
  const bool is_narrow = choice_.target_ids != nullptr, samples = choice_.sampling != nullptr;
  const std::int64_t num_ids = is_narrow ? choice_.num_target_ids : choice_.vocab_size;
  for (std::size_t i = 0; i < num_threads; ++i) {
    Scratch& scratch = scratch_[i];
    scratch.numbers.resize(static_cast<std::size_t>(choice_.vocab_size));
    if (samples) scratch.sampled.resize(2 * static_cast<std::size_t>(num_ids));
    if (samples && is_narrow && !scratch.wide) scratch.wide.emplace(choice_, 1);
  }
}

void Ranker::rank_by_logits(const char* logits, std::int64_t num_ranks, Scratch& scratch, RankedToken* to) const {
  std::vector<float>& numbers = scratch.numbers;
  widen_all(choice_.dtype, logits, numbers.data(), choice_.vocab_size);
  const auto count = static_cast<std::size_t>(num_ranks);
  const std::vector<std::int64_t> ids = largest_places(numbers.data(), choice_.vocab_size, count, largest);
  if (ids.empty()) return;
  const float best = numbers[static_cast<std::size_t>(ids.front())];
  const auto scale = static_cast<float>(1.0 / greedy_temperature_);
  const double total = std::log(sum_of_exponentials(numbers.data(), best, scale, choice_.vocab_size));
  for (const std::int64_t id : ids) {
    const float value = numbers[static_cast<std::size_t>(id)];
    *to++ = {choice_.target_ids == nullptr ? id : choice_.target_ids[id], (value - best) / greedy_temperature_ - total};
  }
}

// The target draws `logits / temperature + noise`, so the probabilities are those of these sums.
void Ranker::rank_by_draws(const char* logits, const Row& own, Scratch& scratch, RankedToken* to) const {
  const auto& [member, ahead, num_ranks] = own;
  const Sampling& all = *choice_.sampling;
  const bool is_narrow = choice_.target_ids != nullptr;
  const SampledRow row{is_narrow ? scratch.wide->spread(logits, 1) : logits,
                       choice_.dtype,
                       is_narrow ? choice_.num_target_ids : choice_.vocab_size,
                       all.temperatures[member],
                       all.top_k[member],
                       all.top_p[member],
                       all.min_p[member],
                       all.seeds[member],
                       all.positions[member] + ahead,
                       {}};
  const std::vector<SampledRank> drawn = sample_ranks(row, std::min(num_ranks, choice_.vocab_size), scratch.sampled);
  std::vector<double> sums;
  for (const SampledRank& each : drawn) sums.push_back(each.logit / std::max(row.temperature, 1e-6) + each.noise);
  const double best = sums.empty() ? 0.0 : *std::max_element(sums.begin(), sums.end());
  double total = 0.0;
  for (const double sum : sums) total += std::exp(sum - best);
  for (std::size_t i = 0; i < drawn.size(); ++i) to[i] = {drawn[i].token, sums[i] - best - std::log(total)};
}

}  // namespace specdec
