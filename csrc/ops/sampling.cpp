#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/multiversion.h"
#include "ops/sampling_noise.h"
#include "ops/sampling_ranks.h"
#include "ops/sampling_threshold.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kBlock = kNoiseBlock;  // tokens that share one bound on the noise that they would need to win

template <typename Format>
SPECDEC_INLINE void widen(const void* logits, std::int64_t size, double* out) {
  const auto* row = static_cast<const typename Format::Storage*>(logits);
  for (std::int64_t i = 0; i < size; ++i) out[i] = Format::load(row[i]);
}

SPECDEC_MULTIVERSION
void to_double(const void* logits, DType dtype, std::int64_t size, double* out) {
  switch (dtype) {
    case DType::kFloat32: return widen<Float32>(logits, size, out);
    case DType::kFloat16: return widen<Float16>(logits, size, out);
    case DType::kBFloat16: return widen<BFloat16>(logits, size, out);
  }
}

double logit(const SampledRow& row, std::int64_t id) {
  switch (row.dtype) {
    case DType::kFloat32: return Float32::load(static_cast<const float*>(row.logits)[id]);
    case DType::kFloat16: return Float16::load(static_cast<const std::uint16_t*>(row.logits)[id]);
    case DType::kBFloat16: return BFloat16::load(static_cast<const std::uint16_t*>(row.logits)[id]);
  }
  return 0.0;
}

// Penalises raw logits, so that an id that was seen twice is penalised once.
void penalise(const SampledRow& row, const std::int64_t* ids, std::int64_t count, double* logits) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= row.vocab_size) continue;  // an id of a model with a larger vocabulary
    const double raw = logit(row, ids[i]);
    logits[ids[i]] = raw < 0 ? raw * row.repetition_penalty : raw / row.repetition_penalty;
  }
}

SPECDEC_MULTIVERSION
bool has_nan(const double* values, std::int64_t size) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < size; ++i) count += values[i] != values[i];
  return count != 0;
}

SPECDEC_MULTIVERSION
void to_scores(double* logits, std::int64_t size, double best, double temperature) {
  for (std::int64_t i = 0; i < size; ++i) logits[i] = (logits[i] - best) / temperature;
}

// The likeliest token gets its noise first. After that, another token needs so much noise to win that few are examined. A
// block is skipped if none of its tokens could win with the largest noise. In other blocks, a token is examined if its
// random word is large enough.
std::int64_t draw(const SampledRow& row, const double* scores, std::int64_t likeliest, double threshold) {
  const Noise noise = noise_of(row.seed, row.position);
  std::int64_t winner = likeliest;
  double highest = noise_at(noise, likeliest);  // its score is 0
  std::uint32_t words[4][kNoiseBlock / 4];
  for (std::int64_t start = 0; start < row.vocab_size; start += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, row.vocab_size - start));
    const double largest = maximum(scores + start, count);
    if (largest < threshold || largest + kLargestNoise < highest) continue;
    const std::uint32_t needed = smallest_word(highest - largest);
    random_words(noise, static_cast<std::uint32_t>(start / 4), (count + 3) / 4, words);
    for (int i = 0; i < count; ++i) {
      const std::uint32_t word = words[i % 4][i / 4];
      if (word < needed || scores[start + i] < threshold) continue;
      const double drawn = scores[start + i] + gumbel(word);
      const bool wins = drawn > highest || (drawn == highest && start + i < winner);
      highest = wins ? drawn : highest;
      winner = wins ? start + i : winner;
    }
  }
  return winner;
}

// Chooses from logits without NaN, of which it makes scores.
std::int64_t choose(const SampledRow& row, double* values) {
  const double best = maximum(values, row.vocab_size);
  const std::int64_t likeliest = std::find(values, values + row.vocab_size, best) - values;
  if (row.temperature == 0.0 || std::isinf(best)) return likeliest;
  to_scores(values, row.vocab_size, best, row.temperature);
  return draw(row, values, likeliest, threshold_of(row, values));
}

}  // namespace

std::int64_t sample_row(const SampledRow& row, std::vector<double>& scratch) {
  const std::int64_t size = row.vocab_size;
  scratch.resize(static_cast<std::size_t>(size));
  double* values = scratch.data();
  to_double(row.logits, row.dtype, size, values);
  if (row.repetition_penalty != 1.0) {
    penalise(row, row.seen.committed, row.seen.num_committed, values);
    penalise(row, row.seen.fed, row.seen.num_fed, values);
  }
  return has_nan(values, size) ? -1 : choose(row, values);
}

std::vector<SampledRank> sample_ranks(const SampledRow& row, std::int64_t num_ranks, std::vector<double>& scratch) {
  const std::int64_t size = row.vocab_size;
  scratch.resize(2 * static_cast<std::size_t>(size));
  double* logits = scratch.data();
  double* values = logits + size;
  to_double(row.logits, row.dtype, size, logits);
  std::vector<SampledRank> found;
  if (has_nan(logits, size)) return found;
  const Noise noise = noise_of(row.seed, row.position);
  const double best = maximum(logits, size);
  if (row.temperature > 0.0 && !std::isinf(best)) {
    std::copy_n(logits, size, values);
    to_scores(values, size, best, row.temperature);
    const std::vector<std::int64_t> tokens =
        is_filtered(row) ? filtered_ranks(row, values, num_ranks) : draw_ranks(noise, values, size, num_ranks);
    for (const std::int64_t token : tokens) found.push_back({token, logits[token], noise_at(noise, token)});
    if (!found.empty()) return found;
  }
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    std::copy_n(logits, size, values);
    const std::int64_t token = choose(row, values);
    found.push_back({token, logits[token], noise_at(noise, token)});
    logits[token] = -kInfinity;
  }
  return found;
}

}  // namespace specdec
