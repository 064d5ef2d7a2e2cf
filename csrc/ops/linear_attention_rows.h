// linear_attention_rows_: linear attention with a recurrent state. specdec_fast/ops/linear_attention_rows.py states the
// contract.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "ops/recurrent_rows.h"

namespace specdec {

// [num_rows, heads, size], strides in elements, the last axis contiguous.
template <typename Number>
struct HeadRows {
  const Number* data;
  std::int64_t stride_row;
  std::int64_t stride_head;
};

struct LinearAttentionRowsArgs {
  DType dtype;
  HeadRows<void> query, key;       // key_heads, key_dim
  HeadRows<void> value;            // value_heads, value_dim
  HeadRows<float> log_decay;       // value_heads, and key_dim if decay_per_channel
  HeadRows<float> beta;            // value_heads; read if has_beta, else 1
  bool decay_per_channel;
  bool has_beta;
  float* states;  // [num_slots, value_heads, key_dim, value_dim], contiguous
  float* kept;    // [num_slots, num_kept, kept_width()], contiguous
  std::int64_t num_slots;
  std::int64_t num_kept;
  std::int64_t key_heads;
  std::int64_t value_heads;
  std::int64_t key_dim;
  std::int64_t value_dim;
  RecurrentRows batch;
  float scale;
  bool delta_rule;
  float l2norm_eps;   // negative: keys and queries are not normalised
  const float* skip;  // [value_heads], or null
  void* out;          // [num_rows, value_heads, value_dim], contiguous
  int num_threads;

  // Where the numbers of a kept row begin: keys, values, decays, betas.
  std::int64_t kept_value() const { return key_heads * key_dim; }
  std::int64_t kept_decay() const { return kept_value() + value_heads * value_dim; }
  std::int64_t kept_beta() const { return kept_decay() + value_heads * decays(); }
  std::int64_t kept_width() const { return kept_beta() + (has_beta ? value_heads : 0); }
  std::int64_t decays() const { return decay_per_channel ? key_dim : 1; }  // of a head
};

// Throws std::out_of_range, before it writes anything, if a sequence reaches outside its arrays.
void linear_attention_rows(const LinearAttentionRowsArgs& args);

}  // namespace specdec
