// The first ranks of one row: what `sample_row` chooses, then what it would choose without that, and so on. Scores are
// (logit - best logit) / temperature, without NaN.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/sampling.h"
#include "ops/sampling_noise.h"

namespace specdec {

// Returns the ranks of a row without filters: the tokens of the `count` largest sums of score and noise.
std::vector<std::int64_t> draw_ranks(const Noise& noise, const double* scores, std::int64_t size, std::int64_t count);

// Returns `count` ranks of a row with filters, or none if a rank may lie outside of the likeliest tokens. The filters apply
// anew to the tokens that are left after each rank.
std::vector<std::int64_t> filtered_ranks(const SampledRow& row, const double* scores, std::int64_t count);

}  // namespace specdec
