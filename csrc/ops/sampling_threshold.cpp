#include "ops/sampling_threshold.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/multiversion.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kBlock = 256;  // scores whose buckets are computed together

// Scores at most 32 below the best are divided into buckets of width 1/32; all others share the last bucket.
constexpr int kBuckets = 1024;
constexpr double kBucketsPerUnit = 32.0;

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

// The scores of one bucket above -inf, largest first. A bitmask leaves many scores of -inf, which would take long to sort.
std::vector<double> falling(const double* scores, std::int64_t size, int bucket, double threshold) {
  std::vector<double> members;
  for (std::int64_t i = 0; i < size; ++i) {
    if (scores[i] == -kInfinity || scores[i] < threshold) continue;
    if (bucket_of(scores[i]) == bucket) members.push_back(scores[i]);
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
  const std::vector<double> members = falling(scores, size, bucket, -kInfinity);
  const auto place = static_cast<std::size_t>(k - 1);
  return place < members.size() ? members[place] : -kInfinity;
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

}  // namespace

SPECDEC_MULTIVERSION
double maximum(const double* values, std::int64_t size) {
  double largest = -kInfinity;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < size; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

double mass_below(double bound, const double* scores, std::int64_t size) {
  double total = 0.0, exps[kBlock];
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, size - start));
    exponentials(scores + start, count, exps);
    for (int i = 0; i < count; ++i) total += scores[start + i] < bound ? exps[i] : 0.0;
  }
  return total;
}

bool is_filtered(const SampledRow& row) {
  return has_top_k(row) || row.top_p < 1.0 || row.min_p > 0.0;
}

double threshold_of(const SampledRow& row, const double* scores) {
  double threshold = -kInfinity;
  if (has_top_k(row)) threshold = kth_largest(scores, row.vocab_size, row.top_k);
  if (row.top_p < 1.0) threshold = nucleus(scores, row.vocab_size, threshold, row.top_p);
  if (row.min_p > 0.0) threshold = std::max(threshold, std::log(row.min_p));
  return threshold;
}

}  // namespace specdec
