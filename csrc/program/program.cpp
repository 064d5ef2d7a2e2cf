#include "program/program.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "ops/append_kv.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/linear_transposed.h"
#include "ops/paged_attention.h"
#include "program/huge_pages.h"

namespace specdec {

namespace {

constexpr std::int64_t kAlignment = 64;  // bytes; a cache line

std::size_t thread_number() {
#ifdef _OPENMP
  return static_cast<std::size_t>(omp_get_thread_num());
#else
  return 0;
#endif
}

template <typename T>
void free_memory(std::vector<T>& memory) {
  std::vector<T>().swap(memory);  // an assignment might keep the capacity
}

// The first aligned byte of `memory`.
char* aligned(std::vector<char>& memory) {
  return memory.data() + (-reinterpret_cast<std::intptr_t>(memory.data()) & (kAlignment - 1));
}

}  // namespace

struct RowOps {
  Domain domain;
  std::vector<RowOp> ops;
  std::int64_t size = 0;  // numbers that these operations compute per row
};

struct Program::Step {
  std::variant<RowOps, LinearStep, GroupedLinearStep, AppendStep, AttendStep, GatherStep> what;
};

// One forward, and the addresses of its buffers.
struct Program::Run {
  const Forward& forward;
  std::vector<Location> buffers;

  std::int64_t num_rows(Domain domain) const {
    return domain == Domain::kRows ? forward.num_rows : forward.num_logit_rows;
  }
};

Program::Program(DType dtype, std::vector<KVShape> layers, std::int64_t arena_bytes, std::int64_t logit_arena_bytes,
                 std::int64_t scratch_bytes)
    : dtype_(dtype),
      layers_(std::move(layers)),
      arena_bytes_(arena_bytes),
      logit_arena_bytes_(logit_arena_bytes),
      scratch_bytes_(scratch_bytes) {}

Program::~Program() = default;

void Program::add(const RowOp& op, Domain domain) {
  auto* last = steps_.empty() ? nullptr : std::get_if<RowOps>(&steps_.back().what);
  if (last == nullptr || last->domain != domain) {
    steps_.push_back({RowOps{domain, {}, 0}});
    last = std::get_if<RowOps>(&steps_.back().what);
  }
  last->ops.push_back(prepared(op));
  last->size += op.size();
  largest_op_ = std::max(largest_op_, op.size());
}

void Program::add(const LinearStep& step) {
  use_huge_pages(step.weight, step.in_features * step.out_features * item_size(step.dtype));
  steps_.push_back({step});
}

void Program::add(const GroupedLinearStep& step) {
  use_huge_pages(step.weight, step.num_experts * step.in_features * step.out_features * item_size(step.dtype));
  steps_.push_back({step});
}

void Program::add(const AppendStep& step) { steps_.push_back({step}); }
void Program::add(const AttendStep& step) { steps_.push_back({step}); }
void Program::add(const GatherStep& step) { steps_.push_back({step}); }

std::int64_t Program::shared_bytes(std::int64_t num_rows, std::int64_t num_logit_rows) const {
  return num_rows * arena_bytes_ + num_logit_rows * logit_arena_bytes_ + kAlignment;
}

std::int64_t Program::bytes_for(std::int64_t num_rows, std::int64_t num_logit_rows, int num_threads) const {
  return shared_bytes(num_rows, num_logit_rows) + num_threads * (scratch_bytes_ + kAlignment + RowScratch::bytes(largest_op_));
}

std::int64_t Program::held_bytes() const {
  std::int64_t bytes = static_cast<std::int64_t>(arena_.capacity());
  for (const std::vector<char>& each : scratch_) bytes += static_cast<std::int64_t>(each.capacity());
  for (const RowScratch& each : row_scratch_) {
    bytes += static_cast<std::int64_t>((each.loaded.capacity() + each.result.capacity()) * sizeof(float));
  }
  return bytes;
}

void Program::release() {
  free_memory(arena_);
  free_memory(scratch_);
  free_memory(row_scratch_);
}

void Program::run(const Forward& forward) {
  const auto started = std::chrono::steady_clock::now();
  const std::int64_t first_logit_byte = forward.num_rows * arena_bytes_;
  const std::int64_t bytes = shared_bytes(forward.num_rows, forward.num_logit_rows);
  if (static_cast<std::int64_t>(arena_.size()) < bytes) {
    free_memory(arena_);  // before there is new memory: it has nothing but the numbers of an earlier forward
    arena_.resize(static_cast<std::size_t>(bytes));
  }
  char* arena = aligned(arena_);
  while (static_cast<int>(scratch_.size()) < forward.num_threads) {
    scratch_.emplace_back(static_cast<std::size_t>(scratch_bytes_ + kAlignment));
    row_scratch_.emplace_back(largest_op_);
  }
  Run run{forward, {}};
  run.buffers.reserve(buffers_.size());
  for (const Buffer& buffer : buffers_) {
    char* base = nullptr;
    if (buffer.place == Buffer::Place::kLogits) {
      base = static_cast<char*>(forward.logits);
    } else if (buffer.place == Buffer::Place::kHiddenStates) {
      if (forward.hidden_states == nullptr) throw std::invalid_argument("a forward has no memory for its hidden states");
      base = static_cast<char*>(forward.hidden_states) + buffer.offset;
    } else if (buffer.place == Buffer::Place::kInputs) {
      if (forward.inputs == nullptr) throw std::invalid_argument("a forward has no inputs, which its program reads");
      base = const_cast<char*>(static_cast<const char*>(forward.inputs));  // no step writes there
    } else if (buffer.place == Buffer::Place::kArena) {
      const bool of_rows = buffer.domain == Domain::kRows;
      base = arena + (of_rows ? 0 : first_logit_byte) + run.num_rows(buffer.domain) * buffer.offset;
    }
    run.buffers.push_back({base, buffer.row_bytes, buffer.offset});
  }
  for (const Step& step : steps_) {
    if (std::holds_alternative<RowOps>(step.what)) {
      run_row_ops(step, run);
    } else if (const auto* linear = std::get_if<LinearStep>(&step.what)) {
      run_linear(*linear, run);
    } else if (const auto* grouped = std::get_if<GroupedLinearStep>(&step.what)) {
      run_grouped_linear(*grouped, run);
    } else if (const auto* append = std::get_if<AppendStep>(&step.what)) {
      run_append(*append, run);
    } else if (const auto* attend = std::get_if<AttendStep>(&step.what)) {
      run_attend(*attend, run);
    } else {
      run_gather(std::get<GatherStep>(step.what), run);
    }
  }
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

void Program::run_row_ops(const Step& step, Run& run) {
  const RowOps& group = std::get<RowOps>(step.what);
  const Forward& forward = run.forward;
  const std::int64_t num_rows = run.num_rows(group.domain);
  // Waking a thread takes some microseconds, in which a core computes some ten thousand numbers.
  const bool worth_threads = num_rows > 1 && num_rows * group.size > (1 << 15);
  std::exception_ptr fault;  // no exception may leave a parallel region
#pragma omp parallel num_threads(forward.num_threads) if (worth_threads)
  {
    const std::size_t thread = thread_number();
    char* own = aligned(scratch_[thread]);
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t source = group.domain == Domain::kRows ? row : forward.logit_rows[row];
      try {
        const RowPlace place{run.buffers.data(), own, row, forward.token_ids[source], forward.positions[source]};
        for (const RowOp& op : group.ops) run_row_op(op, place, row_scratch_[thread]);
      } catch (...) {
#pragma omp critical
        fault = std::current_exception();
      }
    }
  }
  if (fault) std::rethrow_exception(fault);
}

void Program::run_linear(const LinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location& in = run.buffers[step.in];
  const std::int64_t row_stride = step.num_vectors == 1 ? in.row_stride / item_size(step.dtype) : step.in_features;
  const auto compute = step.transposed ? linear_transposed : linear;
  compute({step.dtype, num_rows * step.num_vectors, step.in_features, step.out_features, in.base + step.in_offset,
           row_stride, step.weight, step.bias, run.buffers[step.out].base, run.forward.num_threads});
}

void Program::run_grouped_linear(const GroupedLinearStep& step, const Run& run) const {
  const std::int64_t num_rows = run.num_rows(buffers_[step.in].domain);
  const Location &in = run.buffers[step.in], &experts = run.buffers[step.experts];
  std::vector<std::int64_t> expert_ids(static_cast<std::size_t>(num_rows * step.choices));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto* chosen = reinterpret_cast<const float*>(experts.base + row * experts.row_stride + step.experts_offset);
    for (std::int64_t i = 0; i < step.choices; ++i) {
      expert_ids[row * step.choices + i] = static_cast<std::int64_t>(chosen[i]);
    }
  }
  grouped_linear({step.dtype, num_rows, step.choices, step.num_vectors, step.in_features, step.out_features,
                  step.num_experts, in.base + step.in_offset, in.row_stride / item_size(step.dtype), expert_ids.data(), step.weight,
                  step.transposed, step.bias, run.buffers[step.out].base, run.forward.num_threads});
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

}  // namespace specdec
