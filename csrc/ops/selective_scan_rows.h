// selective_scan_rows_: the state space of Mamba-1. specdec_fast/ops/selective_scan_rows.py states the contract.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "ops/recurrent_rows.h"

namespace specdec {

struct SelectiveScanRowsArgs {
  DType dtype;
  const void* x;    // [num_rows, channels], the last axis contiguous
  const float* dt;  // [num_rows, channels], the last axis contiguous
  const float* a;   // [channels, state_dim]
  const void* b;    // [num_rows, num_groups, state_dim], the last axis contiguous
  const void* c;    // [num_rows, num_groups, state_dim], the last axis contiguous
  std::int64_t stride_x_row, stride_dt_row;  // in elements, as all strides
  std::int64_t stride_a_channel, stride_a_state;
  std::int64_t stride_b_row, stride_b_group, stride_c_row, stride_c_group;
  const float* skip;  // [channels], or null
  float* states;      // [num_slots, state_dim, channels], contiguous
  float* kept;        // [num_slots, num_kept, kept_width()], contiguous
  std::int64_t num_slots;
  std::int64_t num_kept;
  std::int64_t channels;
  std::int64_t state_dim;
  std::int64_t num_groups;
  RecurrentRows batch;
  void* out;  // [num_rows, channels], contiguous
  int num_threads;

  std::int64_t kept_width() const { return 2 * channels + num_groups * state_dim; }  // x, dt, B
};

// Throws std::out_of_range, before it writes anything, if a sequence reaches outside its arrays.
void selective_scan_rows(const SelectiveScanRowsArgs& args);

}  // namespace specdec
