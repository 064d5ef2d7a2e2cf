// append_kv_: write new K/V rows into pages. specdec_fast/ops/append_kv.py states the contract.
#pragma once

#include <cstdint>

namespace specdec {

// Rows of one forward, [num_rows, num_kv_heads, head size]. Strides are in bytes; the last axis is contiguous.
struct NewRows {
  const char* data;
  std::int64_t stride_row;
  std::int64_t stride_head;
  std::int64_t head_bytes;
};

struct AppendKVArgs {
  char* key_cache;  // [num_slots, num_kv_heads, head size of the key], contiguous
  char* value_cache;  // [num_slots, num_kv_heads, head size of the value], contiguous
  std::int64_t num_slots;
  NewRows key;
  NewRows value;
  const std::int32_t* slot_mapping;  // [num_rows]
  std::int64_t num_rows;
  std::int64_t num_kv_heads;
  int num_threads;
};

// Throws std::out_of_range, before it writes anything, if a slot lies outside the cache.
void append_kv(const AppendKVArgs& args);

}  // namespace specdec
