// realign_kv_: shift every row of a dense, right-aligned KV cache by its own amount, in place, in all layers.
// specdec_fast/ops/realign_kv.py states the contract.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec {

struct RealignKVArgs {
  std::vector<char*> planes;  // keys and values of each layer: [batch_size, num_heads, num_columns, column_bytes]
  std::int64_t batch_size;
  std::int64_t num_heads;
  std::int64_t num_columns;
  std::int64_t column_bytes;  // head_dim * element size, contiguous
  std::int64_t stride_row;    // strides are in bytes
  std::int64_t stride_head;
  std::int64_t stride_column;
  const std::int32_t* starts;   // [batch_size]
  const std::int32_t* lengths;  // [batch_size]
  const std::int32_t* shifts;   // [batch_size]
  int num_threads;
};

// Throws std::out_of_range, before it moves anything, if a row would leave the columns of the cache.
void realign_kv(const RealignKVArgs& args);

}  // namespace specdec
