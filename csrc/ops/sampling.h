// One row's draw: the token with the largest sum of score and keyed noise. The rule stands in
// specdec_fast/oracle/ops/verify_chain.py and specdec_fast/oracle/sampling.py.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

// How each of `batch_size` sequences chooses, one element per sequence.
struct Sampling {
  const double* temperatures;
  const std::int32_t* top_k;
  const double* top_p;
  const double* min_p;
  const double* repetition_penalties;
  const std::int64_t* seeds;
  const std::int64_t* positions;  // of the token that a sequence's first row chooses
  const std::int64_t* seen_ids;
  const std::int32_t* cu_seen;  // [batch_size + 1]
};

// Ids that a repetition penalty applies to: committed ones and what was fed.
struct SeenTokens {
  const std::int64_t* committed;
  std::int64_t num_committed;
  const std::int64_t* fed;
  std::int64_t num_fed;
};

// One row's logits and how its token is chosen.
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

// Returns the token, -1 if a logit is NaN. `scratch` is memory that successive rows share.
std::int64_t sample_row(const SampledRow& row, std::vector<double>& scratch);

}  // namespace specdec
