// The ops for Python. This file and bind_program.cpp alone use pybind11. They include no torch headers: Python passes
// addresses and sizes, after specdec_fast/ops/cpp.py has checked shapes, dtypes and contiguity. The GIL is released during
// the calls.
#include "bindings.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/philox.h"
#include "ops/append_kv.h"
#include "ops/compact_kv.h"
#include "ops/conv_rows.h"
#include "ops/grouped_linear.h"
#include "ops/grouped_quantized_linear.h"
#include "ops/linear.h"
#include "ops/linear_attention_rows.h"
#include "ops/linear_transposed.h"
#include "ops/noise_words.h"
#include "ops/paged_attention.h"
#include "ops/quantized_linear.h"
#include "ops/realign_kv.h"
#include "ops/recurrent_rows.h"
#include "ops/selective_scan_rows.h"
#include "ops/verify_chain.h"

namespace {

using specdec::PackedTuple;
using specdec::Sinks;
using specdec::packed_weight;
using specdec::pointer;
using specdec::sampling_at;

void verify_chain(std::uintptr_t logits, int dtype, std::array<std::int64_t, 3> shape, std::uintptr_t token_ids,
                  std::uintptr_t cu_seqlens, std::int64_t batch_size, const std::vector<std::uintptr_t>& sampling,
                  std::uintptr_t parents, std::array<std::uintptr_t, 4> results, int num_threads) {
  const specdec::Sampling rules = sampling_at(sampling);
  const specdec::VerifyChainArgs args{pointer<const void>(logits),
                                      static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2],
                                      pointer<const std::int64_t>(token_ids),
                                      pointer<const std::int32_t>(cu_seqlens), batch_size,
                                      sampling.empty() ? nullptr : &rules, num_threads,
                                      pointer<const std::int32_t>(parents)};
  specdec::verify_chain(args, {pointer<std::int64_t>(results[0]), pointer<std::int32_t>(results[1]),
                               pointer<std::int64_t>(results[2]), pointer<std::int32_t>(results[3])});
}

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  specdec::philox4x32(counter[0], counter[1], counter[2], counter[3], {key[0], key[1]});
  return counter;
}

void noise_words(std::array<std::int64_t, 2> shape, std::array<std::uintptr_t, 3> in, std::uintptr_t words) {
  specdec::noise_words({pointer<const std::int64_t>(in[0]), shape[0], shape[1], pointer<const std::int64_t>(in[1]),
                        pointer<const std::int64_t>(in[2]), pointer<std::int64_t>(words)});
}

void append_kv(std::uintptr_t key_cache, std::uintptr_t value_cache, std::int64_t num_slots,
               std::array<std::int64_t, 4> key, std::array<std::int64_t, 4> value, std::uintptr_t slot_mapping,
               std::array<std::int64_t, 2> sizes, int num_threads) {
  const auto rows = [](const std::array<std::int64_t, 4>& address_and_strides) {
    return specdec::NewRows{pointer<const char>(static_cast<std::uintptr_t>(address_and_strides[0])),
                            address_and_strides[1], address_and_strides[2], address_and_strides[3]};
  };
  specdec::append_kv({pointer<char>(key_cache), pointer<char>(value_cache), num_slots, rows(key), rows(value),
                      pointer<const std::int32_t>(slot_mapping), sizes[0], sizes[1], num_threads});
}

void paged_attention(int dtype, std::array<std::int64_t, 4> query, std::array<std::uintptr_t, 2> caches,
                     std::array<std::int64_t, 6> shape, std::array<std::uintptr_t, 3> indices,
                     std::array<std::int64_t, 2> batch, std::array<std::int64_t, 2> tree_mask,
                     std::array<double, 4> params, const Sinks& sinks, std::uintptr_t out, int num_threads) {
  specdec::paged_attention({static_cast<specdec::DType>(dtype), query[3],
                            pointer<const void>(static_cast<std::uintptr_t>(query[0])), query[1], query[2],
                            pointer<const void>(caches[0]), pointer<const void>(caches[1]),
                            shape[0], shape[1], shape[2], shape[3], shape[4], shape[5],
                            pointer<const std::int32_t>(indices[0]), batch[1],
                            pointer<const std::int32_t>(indices[1]), pointer<const std::int32_t>(indices[2]), batch[0],
                            pointer<const std::int32_t>(static_cast<std::uintptr_t>(tree_mask[0])),
                            tree_mask[1],
                            static_cast<float>(params[0]), static_cast<std::int64_t>(params[1]),
                            static_cast<std::int64_t>(params[3]), static_cast<float>(params[2]),
                            pointer<const void>(sinks.first), static_cast<specdec::DType>(sinks.second),
                            pointer<void>(out), num_threads});
}

void linear(int dtype, std::array<std::int64_t, 3> shape, std::uintptr_t rows, std::int64_t row_stride,
            std::uintptr_t weight, std::uintptr_t bias, std::uintptr_t out, int num_threads) {
  specdec::linear({static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2], pointer<const void>(rows), row_stride,
                   pointer<const void>(weight), pointer<const void>(bias), pointer<void>(out), num_threads});
}

std::int64_t linear_bytes(int dtype, std::array<std::int64_t, 3> shape, bool transposed, int num_threads) {
  const auto count = transposed ? specdec::linear_transposed_bytes : specdec::linear_bytes;
  return count({static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2], nullptr, shape[1], nullptr, nullptr,
                nullptr, num_threads});
}

void quantized_linear(int dtype, std::int64_t num_rows, std::uintptr_t rows, std::int64_t row_stride, const PackedTuple& weight,
                      std::uintptr_t bias, std::uintptr_t out, int num_threads) {
  specdec::quantized_linear({static_cast<specdec::DType>(dtype), num_rows, pointer<const void>(rows), row_stride,
                             packed_weight(weight), pointer<const void>(bias), pointer<void>(out), num_threads});
}

void grouped_linear(int dtype, std::array<std::int64_t, 6> shape, std::uintptr_t rows, std::uintptr_t expert_ids,
                    std::uintptr_t weight, bool transposed, std::uintptr_t bias, std::uintptr_t out, int num_threads) {
  specdec::grouped_linear({static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2], shape[3], shape[4], shape[5],
                           pointer<const void>(rows), shape[2] * shape[3], pointer<const std::int64_t>(expert_ids),
                           pointer<const void>(weight), transposed, pointer<const void>(bias), pointer<void>(out),
                           num_threads});
}

void grouped_quantized_linear(int dtype, std::array<std::int64_t, 4> shape, std::uintptr_t rows, std::uintptr_t expert_ids,
                              const PackedTuple& weight, std::uintptr_t bias, std::uintptr_t out, int num_threads) {
  const specdec::PackedWeight packed = packed_weight(weight);
  specdec::grouped_quantized_linear({static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2], shape[3],
                                     pointer<const void>(rows), shape[2] * packed.in_features,
                                     pointer<const std::int64_t>(expert_ids), packed, pointer<const void>(bias),
                                     pointer<void>(out), num_threads});
}

void compact_kv(std::uintptr_t kv_cache, std::array<std::int64_t, 4> shape, std::uintptr_t block_table,
                std::array<std::int64_t, 2> batch, std::array<std::uintptr_t, 3> moves, int num_threads) {
  specdec::compact_kv({pointer<char>(kv_cache), shape[0], shape[1], shape[2], shape[3],
                       pointer<const std::int32_t>(block_table), batch[0], batch[1],
                       pointer<const std::int32_t>(moves[0]), pointer<const std::int32_t>(moves[1]),
                       pointer<const std::int32_t>(moves[2]), num_threads});
}

void realign_kv(const std::vector<std::uintptr_t>& addresses, std::array<std::int64_t, 4> shape,
                std::array<std::int64_t, 3> strides, std::array<std::uintptr_t, 3> moves, int num_threads) {
  std::vector<char*> planes;
  planes.reserve(addresses.size());
  for (const std::uintptr_t address : addresses) planes.push_back(pointer<char>(address));
  specdec::realign_kv({std::move(planes), shape[0], shape[1], shape[2], shape[3], strides[0], strides[1], strides[2],
                       pointer<const std::int32_t>(moves[0]), pointer<const std::int32_t>(moves[1]),
                       pointer<const std::int32_t>(moves[2]), num_threads});
}

// Numbers of rows and sequences, and the addresses of the arrays in the order of RecurrentRows.
using Recurrent = std::pair<std::array<std::int64_t, 2>, std::array<std::uintptr_t, 5>>;

specdec::RecurrentRows recurrent_rows(const Recurrent& batch) {
  const auto& sizes = batch.first;
  const auto& arrays = batch.second;
  const auto array = [&arrays](int i) { return pointer<const std::int32_t>(arrays[static_cast<std::size_t>(i)]); };
  return {sizes[0], sizes[1], array(0), array(1), array(2), array(3), array(4)};
}

// `rows` and `weight`: address, and stride of a row or size of the kernel. `state`: slots, places and channels.
void conv_rows(int dtype, std::pair<std::uintptr_t, std::int64_t> rows, std::uintptr_t state,
               std::array<std::int64_t, 3> shape, std::pair<std::uintptr_t, std::int64_t> weight, std::uintptr_t bias,
               bool silu, const Recurrent& batch, std::uintptr_t out, int num_threads) {
  specdec::conv_rows({static_cast<specdec::DType>(dtype), pointer<const void>(rows.first), rows.second,
                      pointer<void>(state), shape[0], shape[1], shape[2], pointer<const void>(weight.first),
                      weight.second, pointer<const void>(bias), silu, recurrent_rows(batch), pointer<void>(out),
                      num_threads});
}

// Address, stride of a row, stride of a head.
using Heads = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

template <typename Number>
specdec::HeadRows<Number> head_rows(const Heads& rows) {
  const auto& [address, stride_row, stride_head] = rows;
  return {pointer<const Number>(address), stride_row, stride_head};
}

// `rows`: query, key, value, log_decay, beta. `shape`: slots, places for kept rows, key heads, value heads, key_dim,
// value_dim. `flags`: whether decays are per channel, there are betas, and the delta rule holds. `params`: scale, and the
// epsilon of the normalisation or a negative number.
void linear_attention_rows(int dtype, const std::array<Heads, 5>& rows, std::array<bool, 3> flags,
                           std::array<std::uintptr_t, 2> pools, std::array<std::int64_t, 6> shape,
                           const Recurrent& batch, std::array<double, 2> params, std::uintptr_t skip, std::uintptr_t out,
                           int num_threads) {
  specdec::linear_attention_rows(
      {static_cast<specdec::DType>(dtype), head_rows<void>(rows[0]), head_rows<void>(rows[1]), head_rows<void>(rows[2]),
       head_rows<float>(rows[3]), head_rows<float>(rows[4]), flags[0], flags[1], pointer<float>(pools[0]),
       pointer<float>(pools[1]), shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], recurrent_rows(batch),
       static_cast<float>(params[0]), flags[2], static_cast<float>(params[1]), pointer<const float>(skip),
       pointer<void>(out), num_threads});
}

// `in`: x, dt, A, B, C, skip. `strides`: rows of x and dt; channels and states of A; rows and groups of B and C. `shape`:
// slots, places for kept rows, channels, state_dim, groups.
void selective_scan_rows(int dtype, std::array<std::uintptr_t, 6> in, std::array<std::int64_t, 8> strides,
                         std::array<std::uintptr_t, 2> pools, std::array<std::int64_t, 5> shape, const Recurrent& batch,
                         std::uintptr_t out, int num_threads) {
  specdec::selective_scan_rows(
      {static_cast<specdec::DType>(dtype), pointer<const void>(in[0]), pointer<const float>(in[1]),
       pointer<const float>(in[2]), pointer<const void>(in[3]), pointer<const void>(in[4]), strides[0], strides[1],
       strides[2], strides[3], strides[4], strides[5], strides[6], strides[7], pointer<const float>(in[5]),
       pointer<float>(pools[0]), pointer<float>(pools[1]), shape[0], shape[1], shape[2], shape[3], shape[4],
       recurrent_rows(batch), pointer<void>(out), num_threads});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  m.doc() = "Compiled ops of specdec_fast; call them through specdec_fast.ops.";
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  m.def("append_kv", &append_kv, ReleaseGil());
  m.def("compact_kv", &compact_kv, ReleaseGil());
  m.def("conv_rows", &conv_rows, ReleaseGil());
  m.def("grouped_linear", &grouped_linear, ReleaseGil());
  m.def("grouped_quantized_linear", &grouped_quantized_linear, ReleaseGil());
  m.def("linear", &linear, ReleaseGil());
  m.def("linear_attention_rows", &linear_attention_rows, ReleaseGil());
  m.def("linear_bytes", &linear_bytes);
  m.def("linear_versions", &specdec::linear_versions);
  m.def("choose_linear_version", &specdec::choose_linear_version);
  m.def("linear_transposed_versions", &specdec::linear_transposed_versions);
  m.def("choose_linear_transposed_version", &specdec::choose_linear_transposed_version);
  m.def("noise_words", &noise_words);
  m.def("paged_attention", &paged_attention, ReleaseGil());
  m.def("attention_versions", &specdec::attention_versions);
  m.def("choose_attention_version", &specdec::choose_attention_version);
  m.def("philox4x32", &philox4x32);
  m.def("quantized_linear", &quantized_linear, ReleaseGil());
  m.def("quantized_linear_bytes", &specdec::quantized_linear_bytes);
  m.def("quantized_linear_versions", &specdec::quantized_linear_versions);
  m.def("choose_quantized_linear_version", &specdec::choose_quantized_linear_version);
  m.def("realign_kv", &realign_kv, ReleaseGil());
  m.def("recurrent_versions", &specdec::recurrent_versions);
  m.def("choose_recurrent_version", &specdec::choose_recurrent_version);
  m.def("selective_scan_rows", &selective_scan_rows, ReleaseGil());
  m.def("verify_chain", &verify_chain, ReleaseGil());
  specdec::bind_program(m);
}
