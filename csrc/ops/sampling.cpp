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

// Makes the tokens whose bits are not set impossible.
void mask(const std::int32_t* words, std::int64_t size, double* logits) {
  for (std::int64_t start = 0; start < size; start += 32) {
    const auto word = static_cast<std::uint32_t>(words[start / 32]);
    if (word == ~0u) continue;
    const std::int64_t count = std::min<std::int64_t>(32, size - start);
    for (std::int64_t i = 0; i < count; ++i) {
      if (((word >> i) & 1u) == 0) logits[start + i] = -kInfinity;
    }
  }
}

// A token's number of emissions, and whether it was seen at all.
constexpr std::uint32_t kSeen = 1u << 31;

void count(const std::int64_t* ids, std::int64_t num_ids, std::uint32_t more, std::vector<std::uint32_t>& counts) {
  const auto size = static_cast<std::int64_t>(counts.size());
  for (std::int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= size) continue;  // an id of a model with a larger vocabulary
    std::uint32_t& own = counts[static_cast<std::size_t>(ids[i])];
    own = (own + more) | kSeen;
  }
}

// Penalises the tokens that `counts` says were seen, each once, and leaves zeros.
void penalise(const Edits& edits, const std::int64_t* ids, std::int64_t num_ids, std::vector<std::uint32_t>& counts,
              double* logits) {
  const auto size = static_cast<std::int64_t>(counts.size());
  for (std::int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= size) continue;
    std::uint32_t& own = counts[static_cast<std::size_t>(ids[i])];
    if (own == 0) continue;
    const auto emissions = static_cast<double>(own & ~kSeen);
    own = 0;
    double& value = logits[ids[i]];
    value = value < 0 ? value * edits.repetition_penalty : value / edits.repetition_penalty;
    if (emissions == 0.0) continue;
    const double frequency = edits.frequency_penalty * emissions;
    value = (value - frequency) - edits.presence_penalty;
  }
}

void edit(const Edits& edits, std::int64_t size, std::vector<std::uint32_t>& counts, double* logits) {
  if (edits.allowed != nullptr) mask(edits.allowed, size, logits);
  for (std::int64_t i = 0; i < edits.num_biases; ++i) {
    const std::int64_t id = edits.bias_ids[i];
    if (id >= 0 && id < size) logits[id] += edits.bias_values[i];
  }
  if (!edits.penalise()) return;
  counts.resize(static_cast<std::size_t>(size));
  const SeenTokens& seen = edits.seen;
  const std::int64_t num_emitted = seen.num_committed - seen.num_prompt;
  count(seen.committed, seen.num_prompt, 0, counts);
  count(seen.committed + seen.num_prompt, num_emitted, 1, counts);
  count(seen.fed, 1, 0, counts);
  count(seen.fed + 1, seen.num_fed - 1, 1, counts);
  penalise(edits, seen.committed, seen.num_committed, counts, logits);
  penalise(edits, seen.fed, seen.num_fed, counts, logits);
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

std::int64_t sample_row(const SampledRow& row, SampleScratch& scratch) {
  const std::int64_t size = row.vocab_size;
  scratch.values.resize(static_cast<std::size_t>(size));
  double* values = scratch.values.data();
  to_double(row.logits, row.dtype, size, values);
  if (has_nan(values, size)) return -1;
  if (row.edits.any()) edit(row.edits, size, scratch.counts, values);
  if (row.edits.allowed != nullptr && maximum(values, size) == -kInfinity) return -1;
  return choose(row, values);
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
