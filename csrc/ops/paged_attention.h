// paged_attention: causal attention of ragged query rows over a paged KV cache.
// specdec_fast/ops/paged_attention.py states the contract.
//
// A query row is reduced over absolute tiles of kTile positions in ascending order, from the first position that it sees
// to its own. So its bits depend on its own context alone: not on the number of rows beside it, the batch, the thread, or
// whether the forward is a prefill or a verification.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

constexpr int kTreeMaskBits = 32;  // rows per word of a tree mask

struct PagedAttentionArgs {
  DType dtype;
  std::int64_t num_rows;
  const void* query;  // [num_rows, num_heads, head_dim], strides in elements, last axis contiguous
  std::int64_t stride_query_row;
  std::int64_t stride_query_head;
  const void* key_cache;    // [num_pages, page_size, num_kv_heads, head_dim], contiguous
  const void* value_cache;  // [num_pages, page_size, num_kv_heads, value_dim], contiguous
  std::int64_t num_pages;
  std::int64_t page_size;
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  std::int64_t value_dim;
  const std::int32_t* block_table;  // [batch_size, max_pages]
  std::int64_t max_pages;
  const std::int32_t* cu_seqlens_q;  // [batch_size + 1]
  const std::int32_t* seqused_k;     // [batch_size]
  std::int64_t batch_size;
  const std::int32_t* tree_mask;  // [num_rows, tree_words], or null: a chain
  std::int64_t tree_words;
  float scale;
  std::int64_t sliding_window;   // 0: none
  std::int64_t attention_chunk;  // 0: none; at most one of window and chunk
  float softcap;                 // 0: none
  const void* sinks;             // [num_heads], or null: none
  DType sinks_dtype;
  void* out;  // [num_rows, num_heads, value_dim], contiguous
  int num_threads;
};

// Throws std::out_of_range, before it writes anything, if a sequence reaches outside its rows, its block table or the
// cache.
void paged_attention(const PagedAttentionArgs& args);

// The instruction sets that this machine can run, the best last. The best is chosen; tests choose others, because each must
// give the right result.
std::vector<std::string> attention_versions();
void choose_attention_version(const std::string& name);

}  // namespace specdec
