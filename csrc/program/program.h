// A forward program: a model's whole forward over a ragged batch as a list of steps, run in one call.
//
// specdec_fast/program/ makes it from a run of the model in PyTorch. The steps between linear layers and attention are row
// operations (rowwise.h). Consecutive row operations run row by row, so that their intermediate results stay in the
// first-level cache. Every step computes a row from that row alone (attention also from its KV entries), so no bit depends
// on the rows beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/dtype.h"
#include "ops/quantized_linear.h"
#include "ops/recurrent_rows.h"
#include "program/rank_exchange.h"
#include "program/rowwise.h"

namespace specdec {

// The rows of a buffer: all rows of the batch, or those whose logits are wanted.
enum class Domain : int { kRows = 0, kLogitRows = 1 };

struct Buffer {
  enum class Place : int { kArena = 0, kScratch = 1, kLogits = 2, kHiddenStates = 3, kInputs = 4 };
  Place place;
  Domain domain;
  std::int64_t offset;     // bytes; in the arena for every row of the domain, in the hidden states from a row's begin
  std::int64_t row_bytes;  // in the hidden states and the inputs from one row to the next
};

// A part of a buffer's rows with axes [heads, head_dim], of which the last one is contiguous.
struct HeadsView {
  int buffer;
  std::int64_t offset;       // bytes
  std::int64_t stride_head;  // elements
};

struct LinearStep {
  DType dtype;
  int in, out;                // buffers
  std::int64_t in_offset;     // bytes
  std::int64_t num_vectors;   // products per row
  std::int64_t in_features, out_features;
  const void *weight, *bias;  // bias may be null
  bool transposed;            // weight is [in_features, out_features]
};

struct PackedLinearStep {
  DType dtype;               // of vectors, bias and result
  int in, out;               // buffers
  std::int64_t in_offset;    // bytes
  std::int64_t num_vectors;  // products per row
  PackedWeight weight;
  const void* bias;          // may be null
};

struct GroupedLinearStep {  // see grouped_linear.h
  DType dtype;
  int in, experts, out;                      // buffers; expert ids are fp32 numbers
  std::int64_t in_offset, experts_offset;    // bytes
  std::int64_t num_vectors, choices, in_features, out_features, num_experts;
  const void *weight, *bias;
  bool transposed;
};

struct GroupedPackedLinearStep {  // see grouped_quantized_linear.h
  DType dtype;
  int in, experts, out;                    // buffers; expert ids are fp32 numbers
  std::int64_t in_offset, experts_offset;  // bytes
  std::int64_t num_vectors, choices, num_experts;
  PackedWeight weight;
  const void* bias;
};

struct AppendStep {
  std::int64_t layer;
  HeadsView key, value;
};

struct AttendStep {
  std::int64_t layer, num_heads;
  HeadsView query;
  int out;
  float scale, softcap;                          // softcap 0: none
  std::int64_t sliding_window, attention_chunk;  // 0: none
  const void* sinks;                             // [num_heads] or null
  DType sinks_dtype;
};

// The steps of recurrent layers; see conv_rows.h, linear_attention_rows.h and selective_scan_rows.h. `state` is the number of
// the recurrent call in a forward, and so of its state.
struct ConvolveStep {
  std::int64_t state;
  DType dtype;
  int in, out;             // buffers
  std::int64_t in_offset;  // bytes
  const void *weight, *bias;
  std::int64_t channels, kernel;
  bool silu;
};

struct AttendLinearlyStep {
  std::int64_t state;
  DType dtype;  // of queries, keys and values; decays and betas are fp32
  HeadsView query, key, value, log_decay, beta;
  int out;
  bool decay_per_channel, has_beta, delta_rule;
  std::int64_t key_heads, value_heads, key_dim, value_dim;
  float scale, l2norm_eps;  // l2norm_eps negative: no normalisation
  const float* skip;
};

struct ScanStep {
  std::int64_t state;
  DType dtype;  // of x, b and c; dt is fp32
  HeadsView x, dt, b, c;
  int out;
  const float *a, *skip;
  std::int64_t stride_a_channel, stride_a_state, channels, state_dim, num_groups;
};

struct GatherStep {  // takes the rows whose logits are wanted
  int in, out;
};

struct ExchangeStep {  // sums a buffer over the ranks of a sharded model, or concatenates its rows
  RankExchange* ranks;
  DType dtype;
  Domain domain;
  int in, out;
  std::vector<std::int64_t> widths;  // bytes of a row, by rank; none: a sum
};

// The KV entry of one layer: num_kv_heads keys of key_dim numbers, and as many values of value_dim numbers.
struct KVShape {
  std::int64_t num_kv_heads, key_dim, value_dim;
};

// The addresses of a pool's pages. Page ids are the same in every layer.
struct KVPages {
  char* const* layers;  // [num_layers, 2]: keys and values, each [num_pages, page_size, num_kv_heads, its head size]
  std::int64_t num_pages, page_size;
};

// The addresses of a pool's state slots: of every recurrent call of a forward its states, and its kept rows if it has any.
struct StateSlots {
  char* const* calls = nullptr;  // [num_calls, 2]
  std::int64_t num_calls = 0, num_slots = 0;
  std::int64_t most_draft_tokens = 0;  // for which a slot has room
};

// The arguments of one forward, as addresses.
struct Forward {
  std::int64_t num_rows, num_logit_rows;
  const std::int64_t* token_ids;     // [num_rows]
  const std::int64_t* positions;     // [num_rows]
  const std::int64_t* logit_rows;    // [num_logit_rows]
  const std::int32_t* slot_mapping;  // [num_rows]
  const std::int32_t* block_table;   // [batch_size, max_pages]
  const std::int32_t* cu_seqlens_q;  // [batch_size + 1]
  const std::int32_t* seqused_k;     // [batch_size]
  std::int64_t batch_size, max_pages;
  const std::int32_t* tree_mask;  // [num_rows, tree_words], or null: chains
  std::int64_t tree_words;
  KVPages kv;
  void* logits;  // [num_logit_rows, vocab_size]
  int num_threads;
  void* hidden_states = nullptr;  // [num_rows, taps, size]; null if the program has no buffers there
  const void* inputs = nullptr;   // [num_rows, size], read only; null if the program has no buffer there
  StateSlots states = {};
  RecurrentRows recurrent = {};  // the rows for recurrent layers; cu_seqlens null: the model has none
};

class Program {
 public:
  // `layers`: the layers of the KV cache, in order.
  Program(DType dtype, std::vector<KVShape> layers, std::int64_t arena_bytes, std::int64_t logit_arena_bytes,
          std::int64_t scratch_bytes);
  ~Program();

  // The order of these calls numbers the buffers, and is the order in which steps run.
  void add(const Buffer& buffer) { buffers_.push_back(buffer); }
  void add(const RowOp& op, Domain domain);
  void add(const LinearStep& step);
  void add(const PackedLinearStep& step);
  void add(const GroupedLinearStep& step);
  void add(const GroupedPackedLinearStep& step);
  void add(const AppendStep& step);
  void add(const AttendStep& step);
  void add(const ConvolveStep& step);
  void add(const AttendLinearlyStep& step);
  void add(const ScanStep& step);
  void add(const GatherStep& step);
  void add(const ExchangeStep& step);

  // Runs one forward; one call at a time. Throws std::out_of_range if an index lies outside its array or table, and
  // std::invalid_argument if it has no memory for hidden states that the program computes, or none of its inputs.
  void run(const Forward& forward);

  // The time of all runs so far.
  double seconds() const { return seconds_; }

  // The memory that the program keeps after a forward of so many rows if no larger one came before, in bytes. One forward
  // may have the most rows and another one the most logit rows; the shared memory has the larger of both sizes.
  std::int64_t bytes_for(std::int64_t num_rows, std::int64_t num_logit_rows, int num_threads) const;

  // The memory that it keeps now, in bytes; and frees.
  std::int64_t held_bytes() const;
  void release();

 private:
  struct Step;
  struct Run;
  std::int64_t shared_bytes(std::int64_t num_rows, std::int64_t num_logit_rows) const;
  void run_row_ops(const Step& step, Run& run);
  void run_linear(const LinearStep& step, const Run& run) const;
  void run_packed_linear(const PackedLinearStep& step, const Run& run) const;
  void run_grouped_linear(const GroupedLinearStep& step, const Run& run) const;
  void run_grouped_packed_linear(const GroupedPackedLinearStep& step, const Run& run) const;
  void run_append(const AppendStep& step, const Run& run) const;
  void run_attend(const AttendStep& step, const Run& run) const;
  void run_convolve(const ConvolveStep& step, const Run& run) const;
  void run_attend_linearly(const AttendLinearlyStep& step, const Run& run) const;
  void run_scan(const ScanStep& step, const Run& run) const;
  void run_gather(const GatherStep& step, const Run& run) const;
  void run_exchange(const ExchangeStep& step, const Run& run) const;

  DType dtype_;
  std::vector<KVShape> layers_;
  std::int64_t num_states_ = 0;  // that the steps name
  std::int64_t arena_bytes_, logit_arena_bytes_, scratch_bytes_;  // per row, per logit row, per thread
  std::int64_t largest_op_ = 1;
  double seconds_ = 0.0;
  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  std::vector<char> arena_;
  std::vector<std::vector<char>> scratch_;  // one per thread
  std::vector<RowScratch> row_scratch_;
};

}  // namespace specdec
