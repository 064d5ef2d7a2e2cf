// The filters of sampling: top-k, top-p and min-p, as the lowest score that a token may have.
#pragma once

#include <cstdint>

#include "ops/sampling.h"

namespace specdec {

double maximum(const double* values, std::int64_t size);

// The sum of e^score of all scores below a bound; scores are at most 0.
double mass_below(double bound, const double* scores, std::int64_t size);

// Whether top-k may leave a token of a row out.
inline bool has_top_k(const SampledRow& row) { return row.top_k > 0 && row.top_k < row.vocab_size; }

// Whether a row has a filter that may leave a token out.
bool is_filtered(const SampledRow& row);

// The lowest score of the tokens from which a row draws; -inf: all. Scores are (logit - best logit) / temperature, at most 0.
double threshold_of(const SampledRow& row, const double* scores);

}  // namespace specdec
