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

#include "program/huge_pages.h"
#include "program/run.h"

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
  std::variant<RowOps, LinearStep, PackedLinearStep, GroupedLinearStep, GroupedPackedLinearStep, AppendStep, AttendStep,
               ConvolveStep, AttendLinearlyStep, ScanStep, GatherStep, ExchangeStep>
      what;
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

void Program::add(const PackedLinearStep& step) {
  use_huge_pages(step.weight.codes, step.weight.codes_bytes());
  steps_.push_back({step});
}

void Program::add(const GroupedPackedLinearStep& step) {
  use_huge_pages(step.weight.codes, step.num_experts * step.weight.codes_bytes());
  steps_.push_back({step});
}

void Program::add(const GroupedLinearStep& step) {
  use_huge_pages(step.weight, step.num_experts * step.in_features * step.out_features * item_size(step.dtype));
  steps_.push_back({step});
}

void Program::add(const AppendStep& step) { steps_.push_back({step}); }
void Program::add(const AttendStep& step) { steps_.push_back({step}); }
void Program::add(const GatherStep& step) { steps_.push_back({step}); }
void Program::add(const ExchangeStep& step) { steps_.push_back({step}); }

void Program::add(const ConvolveStep& step) {
  num_states_ = std::max(num_states_, step.state + 1);
  steps_.push_back({step});
}

void Program::add(const AttendLinearlyStep& step) {
  num_states_ = std::max(num_states_, step.state + 1);
  steps_.push_back({step});
}

void Program::add(const ScanStep& step) {
  num_states_ = std::max(num_states_, step.state + 1);
  steps_.push_back({step});
}

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
  if (num_states_ > forward.states.num_calls || (num_states_ && forward.recurrent.cu_seqlens == nullptr)) {
    throw std::invalid_argument("a forward has states of " + std::to_string(forward.states.num_calls) +
                                " recurrent calls, of which its program makes " + std::to_string(num_states_));
  }
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
    } else if (const auto* packed = std::get_if<PackedLinearStep>(&step.what)) {
      run_packed_linear(*packed, run);
    } else if (const auto* grouped_packed = std::get_if<GroupedPackedLinearStep>(&step.what)) {
      run_grouped_packed_linear(*grouped_packed, run);
    } else if (const auto* grouped = std::get_if<GroupedLinearStep>(&step.what)) {
      run_grouped_linear(*grouped, run);
    } else if (const auto* append = std::get_if<AppendStep>(&step.what)) {
      run_append(*append, run);
    } else if (const auto* attend = std::get_if<AttendStep>(&step.what)) {
      run_attend(*attend, run);
    } else if (const auto* convolve = std::get_if<ConvolveStep>(&step.what)) {
      run_convolve(*convolve, run);
    } else if (const auto* linearly = std::get_if<AttendLinearlyStep>(&step.what)) {
      run_attend_linearly(*linearly, run);
    } else if (const auto* scan = std::get_if<ScanStep>(&step.what)) {
      run_scan(*scan, run);
    } else if (const auto* exchange = std::get_if<ExchangeStep>(&step.what)) {
      run_exchange(*exchange, run);
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

}  // namespace specdec
