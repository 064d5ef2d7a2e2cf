// Sampling of one row: the token with the largest sum of score and keyed noise. specdec_fast/ops/verify_chain.py and
// specdec_fast/ops/sampling.py state the rule.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

// How each of `batch_size` sequences chooses its tokens; one element per sequence.
struct Sampling {
  const double* temperatures;
  const std::int32_t* top_k;
  const double* top_p;
  const double* min_p;
  const double* repetition_penalties;
  const std::int64_t* seeds;
  const std::int64_t* positions;  // position of the token that a sequence's first row chooses
  const std::int64_t* seen_ids;
  const std::int32_t* cu_seen;  // [batch_size + 1]
};

// The ids to which a repetition penalty applies: committed tokens, and the input tokens of the rows so far.
struct SeenTokens {
  const std::int64_t* committed;
  std::int64_t num_committed;
  const std::int64_t* fed;
  std::int64_t num_fed;
};

// One row's logits, and how its token is chosen.
struct SampledRow {
  const void* logits;  // [vocab_size]
  DType dtype;
  std::int64_t vocab_size;
  double temperature;
  std::int32_t top_k;
  double top_p;
  double min_p;
  double repetition_penalty;
  std::int64_t seed;
  std::int64_t position;
  SeenTokens seen;
};

// Returns the token, or -1 if a logit is NaN. Successive rows share the memory of `scratch`.
std::int64_t sample_row(const SampledRow& row, std::vector<double>& scratch);

struct SampledRank {
  std::int64_t token;
  double logit;
  double noise;
};

// Returns the token of `sample_row`, then the one that it would be without the first, and so on: `num_ranks` tokens, at most
// `vocab_size`; none if a logit is NaN. There may be no repetition penalty. Successive rows share the memory of `scratch`.
std::vector<SampledRank> sample_ranks(const SampledRow& row, std::int64_t num_ranks, std::vector<double>& scratch);

}  // namespace specdec
