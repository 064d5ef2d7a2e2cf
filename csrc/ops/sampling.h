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
  // Adjustments; null: no sequence has any.
  const double* presence_penalties = nullptr;
  const double* frequency_penalties = nullptr;
  const std::int32_t* num_prompt = nullptr;  // so many of a sequence's first seen_ids are its prompt
  const std::int64_t* bias_ids = nullptr;
  const double* bias_values = nullptr;
  const std::int32_t* cu_bias = nullptr;  // [batch_size + 1]
  // [rows, words]: bit i % 32 of word i / 32 of a row is set if token i may be chosen; null: every token may be chosen.
  const std::int32_t* allowed = nullptr;
};

// The ids to which penalties apply: committed tokens, the first of which are the prompt, and the input tokens of the rows so
// far, the first of which is the last committed one.
struct SeenTokens {
  const std::int64_t* committed;
  std::int64_t num_committed;
  std::int64_t num_prompt;
  const std::int64_t* fed;
  std::int64_t num_fed;
};

// What changes the logits of a row before a token is chosen from them.
struct Edits {
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  SeenTokens seen{};
  const std::int64_t* bias_ids = nullptr;
  const double* bias_values = nullptr;
  std::int64_t num_biases = 0;
  const std::int32_t* allowed = nullptr;  // a bitmask that forbids a token; null: there is none

  bool penalise() const { return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0; }
  bool any() const { return penalise() || num_biases > 0 || allowed != nullptr; }
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
  std::int64_t seed;
  std::int64_t position;
  Edits edits;
};

// Memory that successive rows share.
struct SampleScratch {
  std::vector<double> values;
  std::vector<std::uint32_t> counts;  // by token id; zeros between two rows
};

// Returns the token, or -1 if a logit is NaN, or if a bitmask leaves no token whose logit is above -inf.
std::int64_t sample_row(const SampledRow& row, SampleScratch& scratch);

struct SampledRank {
  std::int64_t token;
  double logit;
  double noise;
};

// Returns the token of `sample_row`, then the one that it would be without the first, and so on: `num_ranks` tokens, at most
// `vocab_size`; none if a logit is NaN. There may be no edits. Successive rows share the memory of `scratch`.
std::vector<SampledRank> sample_ranks(const SampledRow& row, std::int64_t num_ranks, std::vector<double>& scratch);

}  // namespace specdec
