#include "ops/sampling_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "kernels/largest_places.h"
#include "ops/sampling_threshold.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kBlock = kNoiseBlock;            // tokens that are skipped together
constexpr std::int64_t kCandidates = 128;       // without top-k
constexpr std::int64_t kMostCandidates = 1024;  // with more, one pass for each rank is faster
// Of a token that is left: the masses of all others are computed relative to the first rank, as numbers from e^-700 on.
constexpr double kLowestFront = -300.0;

// The tokens of the `count` largest scores and of those that equal the last of these, the largest first: 16-bit logits are
// often equal.
std::vector<std::int64_t> candidates_of(const double* scores, std::int64_t size, std::int64_t count) {
  const double lowest = scores[largest_places(scores, size, static_cast<std::size_t>(count), maximum).back()];
  std::vector<std::int64_t> found;
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const std::int64_t stop = std::min<std::int64_t>(size, start + kBlock);
    if (maximum(scores + start, stop - start) < lowest) continue;
    for (std::int64_t token = start; token < stop; ++token) {
      if (scores[token] >= lowest) found.push_back(token);
    }
  }
  const auto comes_first = [scores](std::int64_t one, std::int64_t other) { return scores[one] > scores[other]; };
  std::stable_sort(found.begin(), found.end(), comes_first);
  return found;
}

// The tokens that are left to the next rank.
class Candidates {
 public:
  Candidates(const SampledRow& row, const double* scores, std::int64_t num_candidates)
      : row_(row),
        scores_(scores),
        noise_(noise_of(row.seed, row.position)),
        has_top_k_(has_top_k(row)),
        left_(candidates_of(scores, row.vocab_size, num_candidates)),
        lowest_(scores[left_.back()]) {
    if (!has_top_k_ && row.top_p < 1.0) others_ = mass_below(lowest_, scores, row.vocab_size);
  }

  std::int64_t size() const { return static_cast<std::int64_t>(left_.size()); }

  // Removes and returns the next rank, or returns -1 if a token that is no candidate may pass the filters.
  std::int64_t take() {
    if (!has_top_k_ && scores_[left_.front()] < kLowestFront) return -1;
    const double threshold = lowest_kept();
    if (threshold < lowest_ && size() < row_.vocab_size) return -1;
    double highest = -kInfinity;
    std::size_t winner = 0;
    for (std::size_t i = 0; i < left_.size() && scores_[left_[i]] >= threshold; ++i) {
      const double drawn = scores_[left_[i]] + noise_at(noise_, left_[i]);
      if (drawn < highest || (drawn == highest && left_[i] > left_[winner])) continue;
      highest = drawn;
      winner = i;
    }
    const std::int64_t token = left_[winner];
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(winner));
    return token;
  }

 private:
  // The lowest score that passes the filters.
  double lowest_kept() const {
    const double front = scores_[left_.front()];
    double threshold = has_top_k_ ? scores_[left_[static_cast<std::size_t>(row_.top_k - 1)]] : -kInfinity;
    if (row_.top_p < 1.0) {
      // Masses are relative to the likeliest token that is left, whose own is 1.
      double total = has_top_k_ ? 0.0 : others_ * std::exp(-front);
      for (const std::int64_t token : left_) total += scores_[token] >= threshold ? std::exp(scores_[token] - front) : 0.0;
      double above = 0.0;
      for (const std::int64_t token : left_) {
        if (scores_[token] < threshold) break;
        above += std::exp(scores_[token] - front);
        if (above < row_.top_p * total) continue;
        threshold = scores_[token];
        break;
      }
    }
    if (row_.min_p > 0.0) threshold = std::max(threshold, front + std::log(row_.min_p));
    return threshold;
  }

  const SampledRow& row_;
  const double* scores_;
  Noise noise_;
  bool has_top_k_;
  std::vector<std::int64_t> left_;  // the largest score first
  double lowest_, others_ = 0.0;    // others_: the mass of all tokens that are no candidates, relative to the first rank
};

}  // namespace

// As in `sample_row`, the likeliest tokens get their noise first.
std::vector<std::int64_t> draw_ranks(const Noise& noise, const double* scores, std::int64_t size, std::int64_t count) {
  using Drawn = std::pair<double, std::int64_t>;
  std::vector<Drawn> found;
  const auto comes_first = [](const Drawn& one, const Drawn& other) {
    return one.first > other.first || (one.first == other.first && one.second < other.second);
  };
  const auto is_full = [&] { return static_cast<std::int64_t>(found.size()) == count; };
  const auto add = [&](std::int64_t token, double sum) {
    const Drawn drawn{sum, token};
    if (is_full() && !comes_first(drawn, found.back())) return;
    if (is_full()) found.pop_back();
    found.insert(std::upper_bound(found.begin(), found.end(), drawn, comes_first), drawn);
  };
  const std::vector<std::int64_t> likeliest = largest_places(scores, size, static_cast<std::size_t>(count), maximum);
  for (const std::int64_t token : likeliest) add(token, scores[token] + noise_at(noise, token));
  std::uint32_t words[4][kNoiseBlock / 4];
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const int length = static_cast<int>(std::min<std::int64_t>(kBlock, size - start));
    const double largest = maximum(scores + start, length);
    if (largest + kLargestNoise < found.back().first) continue;
    const std::uint32_t needed = smallest_word(found.back().first - largest);
    random_words(noise, static_cast<std::uint32_t>(start / 4), (length + 3) / 4, words);
    for (int i = 0; i < length; ++i) {
      const std::uint32_t word = words[i % 4][i / 4];
      if (word < needed || std::find(likeliest.begin(), likeliest.end(), start + i) != likeliest.end()) continue;
      add(start + i, scores[start + i] + gumbel(word));
    }
  }
  std::vector<std::int64_t> tokens;
  for (const Drawn& drawn : found) tokens.push_back(drawn.second);
  return tokens;
}

std::vector<std::int64_t> filtered_ranks(const SampledRow& row, const double* scores, std::int64_t count) {
  const std::int64_t num_candidates = has_top_k(row) ? row.top_k + count : std::max(kCandidates, count);
  if (num_candidates > std::min(row.vocab_size, kMostCandidates)) return {};
  Candidates candidates(row, scores, num_candidates);
  if (candidates.size() > kMostCandidates) return {};
  std::vector<std::int64_t> found;
  while (static_cast<std::int64_t>(found.size()) < count) {
    found.push_back(candidates.take());
    if (found.back() < 0) return {};
  }
  return found;
}

}  // namespace specdec
