// compact_kv_: move kept KV entries inside each sequence, in place, in all layers.
// specdec_fast/ops/compact_kv.py states the contract, and why the order of moves is safe.
#pragma once

#include <cstdint>

namespace specdec {

struct CompactKVArgs {
  char* kv_cache;            // [num_planes, num_pages, page_size, entry_bytes], contiguous
  std::int64_t num_planes;   // a plane holds the keys or the values of one layer
  std::int64_t num_pages;
  std::int64_t page_size;
  std::int64_t entry_bytes;  // num_kv_heads * head_dim * element size
  const std::int32_t* block_table;  // [batch_size, max_pages]
  std::int64_t batch_size;
  std::int64_t max_pages;
  const std::int32_t* cu_moves;      // [batch_size + 1]
  const std::int32_t* sources;       // [num_moves] positions, strictly rising within a sequence
  const std::int32_t* destinations;  // [num_moves] positions, strictly rising within a sequence
  int num_threads;
};

// Throws std::out_of_range, before it writes anything, if a position lies outside its block table or the cache.
void compact_kv(const CompactKVArgs& args);

}  // namespace specdec
