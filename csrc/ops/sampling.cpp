#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

#include "kernels/multiversion.h"
#include "kernels/philox.h"

namespace specdec {
namespace {

#define SPECDEC_INLINE inline __attribute__((always_inline))

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kBlock = 256;  // tokens that share one bound on the noise that they would need to win
constexpr int kCounters = kBlock / 4;

// Scores at most 32 below the best are divided into buckets of width 1/32; all others share the last bucket.
constexpr int kBuckets = 1024;
constexpr double kBucketsPerUnit = 32.0;

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
double maximum(const double* values, std::int64_t size) {
  double largest = -kInfinity;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < size; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
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

// exp(x) for x <= 0 within 2 units in the last place: 2^n * e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial.
SPECDEC_INLINE double exp_nonpositive(double x) {
  constexpr double kMagic = 0x1.8p52;  // adding it leaves the rounded number in the lowest bits
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shifted = clamped * 1.4426950408889634 + kMagic;
  const double n = shifted - kMagic;
  const double r = (clamped - n * 0x1.62e42fefa0000p-1) - n * 0x1.cf79abc9e3b3ap-40;
  constexpr double kInverseFactorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                           1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                           1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5,
                                           1.0,              1.0};
  double e = kInverseFactorials[0];
  for (int i = 1; i < 14; ++i) e = e * r + kInverseFactorials[i];
  const std::uint64_t exponent = (bit_cast<std::uint64_t>(shifted) + 1023u) << 52;
  return x < -700.0 ? 0.0 : e * bit_cast<double>(exponent);
}

SPECDEC_MULTIVERSION
void exponentials(const double* scores, int count, double* out) {
  for (int i = 0; i < count; ++i) out[i] = exp_nonpositive(scores[i]);
}

SPECDEC_INLINE int bucket_of(double score) {
  return static_cast<int>(std::min(-score * kBucketsPerUnit, kBuckets - 1.0));
}

SPECDEC_MULTIVERSION
void buckets_of(const double* scores, int count, std::int32_t* out) {
  for (int i = 0; i < count; ++i) {
    const double place = -scores[i] * kBucketsPerUnit;
    out[i] = static_cast<std::int32_t>(place < kBuckets - 1.0 ? place : kBuckets - 1.0);
  }
}

// The scores of one bucket, largest first.
std::vector<double> falling(const double* scores, std::int64_t size, int bucket, double threshold) {
  std::vector<double> members;
  for (std::int64_t i = 0; i < size; ++i) {
    if (scores[i] >= threshold && bucket_of(scores[i]) == bucket) members.push_back(scores[i]);
  }
  std::sort(members.begin(), members.end(), std::greater<double>());
  return members;
}

// The k-th largest score, 1 <= k <= size.
double kth_largest(const double* scores, std::int64_t size, std::int64_t k) {
  std::int64_t counts[kBuckets] = {};
  std::int32_t buckets[kBlock];
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, size - start));
    buckets_of(scores + start, count, buckets);
    for (int i = 0; i < count; ++i) ++counts[buckets[i]];
  }
  int bucket = 0;
  while (k > counts[bucket]) k -= counts[bucket++];
  return falling(scores, size, bucket, -kInfinity)[static_cast<std::size_t>(k - 1)];
}

// The lowest score in the smallest set of the likeliest tokens whose mass is a share `top_p` of the mass of all tokens from
// `threshold` on.
double nucleus(const double* scores, std::int64_t size, double threshold, double top_p) {
  double masses[kBuckets] = {};
  std::int32_t buckets[kBlock];
  double exps[kBlock];
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, size - start));
    buckets_of(scores + start, count, buckets);
    exponentials(scores + start, count, exps);
    for (int i = 0; i < count; ++i) masses[buckets[i]] += scores[start + i] >= threshold ? exps[i] : 0.0;
  }
  double total = 0.0;
  for (const double mass : masses) total += mass;
  const double wanted = top_p * total;
  int bucket = 0;
  double above = 0.0;
  while (bucket < kBuckets - 1 && above + masses[bucket] < wanted) above += masses[bucket++];
  double lowest = threshold;
  for (const double score : falling(scores, size, bucket, threshold)) {
    lowest = score;
    above += exp_nonpositive(score);
    if (above >= wanted) break;
  }
  return lowest;
}

double threshold_of(const SampledRow& row, const double* scores) {
  double threshold = -kInfinity;
  if (row.top_k > 0 && row.top_k < row.vocab_size) threshold = kth_largest(scores, row.vocab_size, row.top_k);
  if (row.top_p < 1.0) threshold = nucleus(scores, row.vocab_size, threshold, row.top_p);
  if (row.min_p > 0.0) threshold = std::max(threshold, std::log(row.min_p));
  return threshold;
}

// The noise of one position; every counter gives the words of four tokens.
struct Noise {
  std::uint32_t position_low;
  std::uint32_t position_high;
  PhiloxKey key;
};

Noise noise_of(const SampledRow& row) {
  const auto position = static_cast<std::uint64_t>(row.position);
  const auto seed = static_cast<std::uint64_t>(row.seed);
  return {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32),
          {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}};
}

// Word w of counter `first + i` at words[w][i].
SPECDEC_MULTIVERSION
void random_words(const Noise& noise, std::uint32_t first, int num_counters, std::uint32_t words[4][kCounters]) {
  for (int i = 0; i < num_counters; ++i) {
    std::uint32_t c0 = first + static_cast<std::uint32_t>(i), c1 = noise.position_low, c2 = noise.position_high, c3 = 0;
    philox4x32(c0, c1, c2, c3, noise.key);
    words[0][i] = c0;
    words[1][i] = c1;
    words[2][i] = c2;
    words[3][i] = c3;
  }
}

double noise_at(const Noise& noise, std::int64_t id) {
  std::uint32_t words[4] = {static_cast<std::uint32_t>(id / 4), noise.position_low, noise.position_high, 0};
  philox4x32(words[0], words[1], words[2], words[3], noise.key);
  return gumbel(words[id % 4]);
}

// The smallest word whose noise reaches `wanted`, or a slightly smaller one: -log(-log(u)) >= wanted, solved for u.
std::uint32_t smallest_word(double wanted) {
  const double word = std::exp(-std::exp(-wanted)) * 0x1p32 - 2.0;
  return word > 0.0 ? static_cast<std::uint32_t>(std::min(word, 0x1.fffffffcp31)) : 0u;
}

// The likeliest token gets its noise first. After that, another token needs so much noise to win that few are examined. A
// block is skipped if none of its tokens could win with the largest noise. In other blocks, a token is examined if its
// random word is large enough.
std::int64_t draw(const SampledRow& row, const double* scores, std::int64_t likeliest, double threshold) {
  const Noise noise = noise_of(row);
  std::int64_t winner = likeliest;
  double highest = noise_at(noise, likeliest);  // its score is 0
  std::uint32_t words[4][kCounters];
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

std::vector<SampledRank> sample_ranks(const SampledRow& row, std::int64_t num_ranks) {
  std::vector<double> logits(static_cast<std::size_t>(row.vocab_size)), values;
  to_double(row.logits, row.dtype, row.vocab_size, logits.data());
  std::vector<SampledRank> found;
  if (has_nan(logits.data(), row.vocab_size)) return found;
  const Noise noise = noise_of(row);
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    values = logits;
    const std::int64_t token = choose(row, values.data());
    double& logit = logits[static_cast<std::size_t>(token)];
    found.push_back({token, logit, noise_at(noise, token)});
    logit = -kInfinity;
  }
  return found;
}

}  // namespace specdec
