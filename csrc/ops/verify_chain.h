// verify_chain: which draft tokens, of a chain or a tree, the target itself would have emitted.
// specdec_fast/ops/verify_chain.py states the contract, and what a NaN means.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "ops/sampling.h"

namespace specdec {

struct VerifyChainArgs {
  const void* logits;         // [num_rows, vocab_size], rows `row_stride` elements apart
  DType dtype;
  std::int64_t num_rows;
  std::int64_t vocab_size;
  std::int64_t row_stride;
  const std::int64_t* token_ids;   // [num_rows] the input tokens of the forward
  const std::int32_t* cu_seqlens;  // [batch_size + 1]
  std::int64_t batch_size;
  const Sampling* sampling;  // null: all sequences are greedy
  int num_threads;
  const std::int32_t* parents = nullptr;  // [num_rows], counted from the sequence's first row; null: chains
};

struct VerifyChainResult {
  std::int64_t* target_tokens;  // [num_rows]
  std::int32_t* num_accepted;   // [batch_size]
  std::int64_t* next_tokens;    // [batch_size]
  std::int32_t* accepted_rows = nullptr;  // [num_rows], if there are parents
};

void verify_chain(const VerifyChainArgs& args, const VerifyChainResult& result);

}  // namespace specdec
