// The steps of a program that are no row operations: each calls an op with the addresses of its buffers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/append_kv.h"
#include "ops/conv_rows.h"
#include "ops/grouped_linear.h"
#include "ops/grouped_quantized_linear.h"
#include "ops/linear.h"
#include "ops/linear_attention_rows.h"
#include "ops/linear_transposed.h"
#include "ops/paged_attention.h"
#include "ops/quantized_linear.h"
#include "ops/selective_scan_rows.h"
#include "program/program.h"
#include "program/run.h"

namespace specdec {
namespace {

// The ids of the experts that rows have chosen, which a program computes as fp32 numbers.
std::vector<std::int64_t> expert_ids_of(const Location& experts, std::int64_t offset, std::int64_t num_rows, std::int64_t choices) {
  std::vector<std::int64_t> expert_ids(static_cast<std::size_t>(num_rows * choices));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto* chosen = reinterpret_cast<const float*>(experts.base + row * experts.row_stride + offset);
    for (std::int64_t i = 0; i < choices; ++i) expert_ids[row * choices + i] = static_cast<std::int64_t>(chosen[i]);
  }
  return expert_ids;
}

}  // namespace

void Program::run_linear(const LinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location& in = run.buffers[step.in];
  const std::int64_t row_stride = step.num_vectors == 1 ? in.row_stride / item_size(step.dtype) : step.in_features;
  const auto compute = step.transposed ? linear_transposed : linear;
  compute({step.dtype, num_rows * step.num_vectors, step.in_features, step.out_features, in.base + step.in_offset,
           row_stride, step.weight, step.bias, run.buffers[step.out].base, run.forward.num_threads});
}

void Program::run_packed_linear(const PackedLinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location& in = run.buffers[step.in];
  const std::int64_t row_stride = step.num_vectors == 1 ? in.row_stride / item_size(step.dtype) : step.weight.in_features;
  quantized_linear({step.dtype, num_rows * step.num_vectors, in.base + step.in_offset, row_stride, step.weight, step.bias,
                    run.buffers[step.out].base, run.forward.num_threads});
}

void Program::run_grouped_linear(const GroupedLinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location& in = run.buffers[step.in];
  const std::vector<std::int64_t> expert_ids = expert_ids_of(run.buffers[step.experts], step.experts_offset, num_rows, step.choices);
  grouped_linear({step.dtype, num_rows, step.choices, step.num_vectors, step.in_features, step.out_features,
                  step.num_experts, in.base + step.in_offset, in.row_stride / item_size(step.dtype), expert_ids.data(), step.weight,
                  step.transposed, step.bias, run.buffers[step.out].base, run.forward.num_threads});
}

void Program::run_grouped_packed_linear(const GroupedPackedLinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location& in = run.buffers[step.in];
  const std::vector<std::int64_t> expert_ids = expert_ids_of(run.buffers[step.experts], step.experts_offset, num_rows, step.choices);
  grouped_quantized_linear({step.dtype, num_rows, step.choices, step.num_vectors, step.num_experts, in.base + step.in_offset,
                            in.row_stride / item_size(step.dtype), expert_ids.data(), step.weight, step.bias,
                            run.buffers[step.out].base, run.forward.num_threads});
}

void Program::run_append(const AppendStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  const KVShape& shape = layers_[step.layer];
  const std::int64_t item = item_size(dtype_);
  const auto rows = [&](const HeadsView& view, std::int64_t head_dim) {
    return NewRows{run.buffers[view.buffer].base + view.offset, run.buffers[view.buffer].row_stride,
                   view.stride_head * item, head_dim * item};
  };
  append_kv({forward.kv.layers[2 * step.layer], forward.kv.layers[2 * step.layer + 1],
             forward.kv.num_pages * forward.kv.page_size, rows(step.key, shape.key_dim),
             rows(step.value, shape.value_dim), forward.slot_mapping, forward.num_rows, shape.num_kv_heads,
             forward.num_threads});
}

void Program::run_attend(const AttendStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  const KVShape& shape = layers_[step.layer];
  const std::int64_t item = item_size(dtype_);
  paged_attention({dtype_,
                   forward.num_rows,
                   run.buffers[step.query.buffer].base + step.query.offset,
                   run.buffers[step.query.buffer].row_stride / item,
                   step.query.stride_head,
                   forward.kv.layers[2 * step.layer],
                   forward.kv.layers[2 * step.layer + 1],
                   forward.kv.num_pages,
                   forward.kv.page_size,
                   step.num_heads,
                   shape.num_kv_heads,
                   shape.key_dim,
                   shape.value_dim,
                   forward.block_table,
                   forward.max_pages,
                   forward.cu_seqlens_q,
                   forward.seqused_k,
                   forward.batch_size,
                   forward.tree_mask,
                   forward.tree_words,
                   step.scale,
                   step.sliding_window,
                   step.attention_chunk,
                   step.softcap,
                   step.sinks,
                   step.sinks_dtype,
                   run.buffers[step.out].base,
                   forward.num_threads});
}

namespace {

template <typename Number>
HeadRows<Number> head_rows(const Location& at, const HeadsView& view, std::int64_t item) {
  return {reinterpret_cast<const Number*>(at.base + view.offset), at.row_stride / item, view.stride_head};
}

// Places for kept rows of a slot: those of two verifications.
std::int64_t num_kept(const StateSlots& states) { return 2 * states.most_draft_tokens + 1; }

}  // namespace

void Program::run_convolve(const ConvolveStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  const Location& in = run.buffers[step.in];
  const std::int64_t num_places = std::max<std::int64_t>(1, step.kernel - 1 + forward.states.most_draft_tokens);
  conv_rows({step.dtype, in.base + step.in_offset, in.row_stride / item_size(step.dtype),
             forward.states.calls[2 * step.state], forward.states.num_slots, num_places, step.channels, step.weight,
             step.kernel, step.bias, step.silu, forward.recurrent, run.buffers[step.out].base, forward.num_threads});
}

void Program::run_attend_linearly(const AttendLinearlyStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  char* const* state = forward.states.calls + 2 * step.state;
  const std::int64_t item = item_size(step.dtype), fp32 = item_size(DType::kFloat32);
  const auto at = [&](const HeadsView& view) -> const Location& { return run.buffers[view.buffer]; };
  linear_attention_rows({step.dtype,
                         head_rows<void>(at(step.query), step.query, item),
                         head_rows<void>(at(step.key), step.key, item),
                         head_rows<void>(at(step.value), step.value, item),
                         head_rows<float>(at(step.log_decay), step.log_decay, fp32),
                         head_rows<float>(at(step.beta), step.beta, fp32),
                         step.decay_per_channel,
                         step.has_beta,
                         reinterpret_cast<float*>(state[0]),
                         reinterpret_cast<float*>(state[1]),
                         forward.states.num_slots,
                         num_kept(forward.states),
                         step.key_heads,
                         step.value_heads,
                         step.key_dim,
                         step.value_dim,
                         forward.recurrent,
                         step.scale,
                         step.delta_rule,
                         step.l2norm_eps,
                         step.skip,
                         run.buffers[step.out].base,
                         forward.num_threads});
}

void Program::run_scan(const ScanStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  char* const* state = forward.states.calls + 2 * step.state;
  const std::int64_t item = item_size(step.dtype), fp32 = item_size(DType::kFloat32);
  const auto rows = [&](const HeadsView& view) { return run.buffers[view.buffer].base + view.offset; };
  const auto stride = [&](const HeadsView& view, std::int64_t size) { return run.buffers[view.buffer].row_stride / size; };
  selective_scan_rows({step.dtype, rows(step.x), reinterpret_cast<const float*>(rows(step.dt)), step.a, rows(step.b),
                       rows(step.c), stride(step.x, item), stride(step.dt, fp32), step.stride_a_channel,
                       step.stride_a_state, stride(step.b, item), step.b.stride_head, stride(step.c, item),
                       step.c.stride_head, step.skip, reinterpret_cast<float*>(state[0]),
                       reinterpret_cast<float*>(state[1]), forward.states.num_slots, num_kept(forward.states),
                       step.channels, step.state_dim, step.num_groups, forward.recurrent, run.buffers[step.out].base,
                       forward.num_threads});
}

void Program::run_gather(const GatherStep& step, const Run& run) const {
  const Forward& forward = run.forward;
  const Location &from = run.buffers[step.in], &to = run.buffers[step.out];
  for (std::int64_t i = 0; i < forward.num_logit_rows; ++i) {
    const std::int64_t row = forward.logit_rows[i];
    if (row < 0 || row >= forward.num_rows) {
      throw std::out_of_range("logit_rows[" + std::to_string(i) + "] is " + std::to_string(row) + "; there are " +
                              std::to_string(forward.num_rows) + " rows");
    }
    std::memcpy(to.base + i * to.row_stride, from.base + row * from.row_stride, static_cast<std::size_t>(to.row_stride));
  }
}

void Program::run_exchange(const ExchangeStep& step, const Run& run) const {
  const Location &from = run.buffers[step.in], &to = run.buffers[step.out];
  const std::int64_t num_rows = run.num_rows(step.domain);
  if (step.widths.empty()) {
    step.ranks->sum(step.dtype, from.base, to.base, num_rows * from.row_stride / item_size(step.dtype));
  } else {
    step.ranks->concatenate(from.base, to.base, num_rows, step.widths);
  }
}

}  // namespace specdec
