// The only file that uses pybind11. It includes no torch headers: Python passes addresses and sizes, after
// specdec_fast/ops/cpp.py has checked shapes, dtypes and contiguity. The GIL is released during the calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/philox.h"
#include "ops/append_kv.h"
#include "ops/compact_kv.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/linear_transposed.h"
#include "ops/noise_words.h"
#include "ops/paged_attention.h"
#include "ops/realign_kv.h"
#include "ops/verify_chain.h"
#include "program/drafting.h"
#include "program/program.h"
#include "program/verifying.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// `addresses`: of its arrays in the order of specdec::Sampling, none for greedy decoding.
specdec::Sampling sampling_at(const std::vector<std::uintptr_t>& addresses) {
  if (addresses.empty()) return {};
  return {pointer<const double>(addresses.at(0)),       pointer<const std::int32_t>(addresses.at(1)),
          pointer<const double>(addresses.at(2)),       pointer<const double>(addresses.at(3)),
          pointer<const double>(addresses.at(4)),       pointer<const std::int64_t>(addresses.at(5)),
          pointer<const std::int64_t>(addresses.at(6)), pointer<const std::int64_t>(addresses.at(7)),
          pointer<const std::int32_t>(addresses.at(8))};
}

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

using Sinks = std::pair<std::uintptr_t, int>;  // address, or 0 for none, and dtype

void paged_attention(int dtype, std::array<std::int64_t, 4> query, std::array<std::uintptr_t, 2> caches,
                     std::array<std::int64_t, 6> shape, std::array<std::uintptr_t, 3> indices,
                     std::array<std::int64_t, 2> batch, std::array<std::int64_t, 2> tree_mask,
                     std::array<double, 3> params, const Sinks& sinks, std::uintptr_t out, int num_threads) {
  specdec::paged_attention({static_cast<specdec::DType>(dtype), query[3],
                            pointer<const void>(static_cast<std::uintptr_t>(query[0])), query[1], query[2],
                            pointer<const void>(caches[0]), pointer<const void>(caches[1]),
                            shape[0], shape[1], shape[2], shape[3], shape[4], shape[5],
                            pointer<const std::int32_t>(indices[0]), batch[1],
                            pointer<const std::int32_t>(indices[1]), pointer<const std::int32_t>(indices[2]), batch[0],
                            pointer<const std::int32_t>(static_cast<std::uintptr_t>(tree_mask[0])),
                            tree_mask[1],
                            static_cast<float>(params[0]), static_cast<std::int64_t>(params[1]),
                            static_cast<float>(params[2]),
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

void grouped_linear(int dtype, std::array<std::int64_t, 6> shape, std::uintptr_t rows, std::uintptr_t expert_ids,
                    std::uintptr_t weight, bool transposed, std::uintptr_t bias, std::uintptr_t out, int num_threads) {
  specdec::grouped_linear({static_cast<specdec::DType>(dtype), shape[0], shape[1], shape[2], shape[3], shape[4], shape[5],
                           pointer<const void>(rows), shape[2] * shape[3], pointer<const std::int64_t>(expert_ids),
                           pointer<const void>(weight), transposed, pointer<const void>(bias), pointer<void>(out),
                           num_threads});
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

// place, dtype, buffer, address of a constant, immediate, offset, strides, length of the last axis
using OperandTuple =
    std::tuple<int, int, int, std::uintptr_t, float, std::int64_t, std::array<std::int64_t, specdec::kMaxRank>, std::int64_t>;

specdec::Operand operand(const OperandTuple& t) {
  return {static_cast<specdec::Operand::Place>(std::get<0>(t)), static_cast<specdec::DType>(std::get<1>(t)), std::get<2>(t),
          pointer<const char>(std::get<3>(t)), std::get<4>(t), std::get<5>(t), std::get<6>(t), std::get<7>(t)};
}

using Addresses = std::array<std::uintptr_t, 12>;
using ForwardSizes = std::array<std::int64_t, 8>;

// In the order of specdec_fast/program/cpp_executor.py.
specdec::Forward forward(const Addresses& at, const ForwardSizes& sizes) {
  return {sizes[0], sizes[1],
          pointer<const std::int64_t>(at[0]), pointer<const std::int64_t>(at[1]), pointer<const std::int64_t>(at[2]),
          pointer<const std::int32_t>(at[3]), pointer<const std::int32_t>(at[4]), pointer<const std::int32_t>(at[5]),
          pointer<const std::int32_t>(at[6]), sizes[2], sizes[3],
          pointer<const std::int32_t>(at[7]), sizes[4],
          {pointer<char* const>(at[8]), sizes[5], sizes[6]},
          pointer<void>(at[9]),
          static_cast<int>(sizes[7]), pointer<void>(at[10]), pointer<const void>(at[11])};
}

// In the order of specdec_fast/program/cpp_executor.py: of the tables their address and sizes, then of the layers' pages.
specdec::Pages pages_at(const std::array<std::int64_t, 6>& t) {
  return {pointer<const std::int32_t>(static_cast<std::uintptr_t>(t[0])), t[1], t[2],
          {pointer<char* const>(static_cast<std::uintptr_t>(t[3])), t[4], t[5]}};
}

using Spans = std::vector<std::array<std::int64_t, 3>>;

std::vector<specdec::Span> spans_of(const Spans& spans) {
  std::vector<specdec::Span> found;
  found.reserve(spans.size());
  for (const auto& [place, start, count] : spans) found.push_back({place, start, count});
  return found;
}

// dtype, width, number of ids that may be chosen; of a drafter with ids of its own also the address of the target's ids,
// and their number
using ChoiceSizes = std::array<std::int64_t, 5>;

specdec::Choice choice_of(const ChoiceSizes& of, const specdec::Sampling* sampling) {
  return {static_cast<specdec::DType>(of[0]), of[1], of[2], sampling,
          pointer<const std::int64_t>(static_cast<std::uintptr_t>(of[3])), of[4]};
}

// In the order of specdec::CarriedRows.
using Carried = std::tuple<std::uintptr_t, std::int64_t, specdec::Program*, std::int64_t,
                           std::vector<std::pair<std::uintptr_t, std::int64_t>>>;

void draft(specdec::Program& program, const std::array<std::int64_t, 6>& pages, const Spans& spans,
           const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& num_draft_tokens,
           const Carried& carried, const ChoiceSizes& choice,
           const std::vector<std::uintptr_t>& sampling, int num_threads, std::uintptr_t chosen) {
  const specdec::Sampling rules = sampling_at(sampling);
  const auto& [first, row_bytes, projection, input_bytes, pieces] = carried;
  specdec::CarriedRows rows{pointer<const char>(first), row_bytes, projection, input_bytes, {}};
  for (const auto& [address, count] : pieces) rows.pieces.emplace_back(pointer<const char>(address), count);
  specdec::draft(program, pages_at(pages), {spans_of(spans), token_ids, num_draft_tokens, rows},
                 choice_of(choice, sampling.empty() ? nullptr : &rules), num_threads, pointer<std::int64_t>(chosen));
}

std::tuple<std::vector<std::vector<std::int64_t>>, std::vector<std::vector<std::int32_t>>, double> verify(
    specdec::Program& program, const std::array<std::int64_t, 6>& pages, const Spans& spans,
    const std::vector<std::int64_t>& last_tokens, std::array<std::uintptr_t, 3> draft_tokens, const ChoiceSizes& choice,
    const std::vector<std::uintptr_t>& sampling, int num_threads, std::array<std::uintptr_t, 2> outputs) {
  const specdec::Sampling rules = sampling_at(sampling);
  specdec::Verified found = specdec::verify(
      program, pages_at(pages),
      {spans_of(spans), last_tokens, pointer<const std::int64_t>(draft_tokens[0]),
       static_cast<std::int64_t>(draft_tokens[1]), pointer<const std::int32_t>(draft_tokens[2])},
      choice_of(choice, sampling.empty() ? nullptr : &rules), num_threads, pointer<void>(outputs[0]),
      pointer<void>(outputs[1]));
  return {std::move(found.emissions), std::move(found.paths), found.seconds};
}

void bind_program(py::module_& m) {
  using specdec::Program;
  using Sizes = std::vector<std::int64_t>;
  py::class_<Program>(m, "Program")
      .def(py::init([](int dtype, const std::vector<std::array<std::int64_t, 3>>& shapes, const Sizes& bytes) {
        std::vector<specdec::KVShape> layers;
        for (const auto& [num_kv_heads, key_dim, value_dim] : shapes) layers.push_back({num_kv_heads, key_dim, value_dim});
        return new Program(static_cast<specdec::DType>(dtype), std::move(layers), bytes.at(0), bytes.at(1), bytes.at(2));
      }))
      .def("add_buffer",
           [](Program& self, int place, int domain, std::int64_t offset, std::int64_t row_bytes) {
             self.add(specdec::Buffer{static_cast<specdec::Buffer::Place>(place), static_cast<specdec::Domain>(domain),
                                      offset, row_bytes});
           })
      .def("add_row_op",
           [](Program& self, int domain, int code, std::array<std::int64_t, specdec::kMaxRank> shape,
              const std::vector<OperandTuple>& in, const OperandTuple& out, float scalar, bool by_position,
              std::int64_t table_rows) {
             specdec::RowOp op{static_cast<specdec::RowCode>(code), shape,      {}, operand(out), scalar,
                               by_position,                         table_rows};
             for (const OperandTuple& each : in) op.in.push_back(operand(each));
             self.add(op, static_cast<specdec::Domain>(domain));
           })
      .def("add_linear",
           [](Program& self, int dtype, int in, int out, std::int64_t in_offset, std::array<std::int64_t, 3> sizes,
              std::uintptr_t weight, std::uintptr_t bias, bool transposed) {
             self.add(specdec::LinearStep{static_cast<specdec::DType>(dtype), in, out, in_offset, sizes[0], sizes[1],
                                          sizes[2], pointer<const void>(weight), pointer<const void>(bias), transposed});
           })
      .def("add_grouped_linear",
           [](Program& self, int dtype, std::array<int, 3> buffers, std::array<std::int64_t, 2> offsets,
              std::array<std::int64_t, 5> sizes, std::uintptr_t weight, std::uintptr_t bias, bool transposed) {
             self.add(specdec::GroupedLinearStep{static_cast<specdec::DType>(dtype), buffers[0], buffers[1], buffers[2],
                                                 offsets[0], offsets[1], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                                                 pointer<const void>(weight), pointer<const void>(bias), transposed});
           })
      .def("add_append",
           [](Program& self, std::int64_t layer, std::array<std::int64_t, 3> key, std::array<std::int64_t, 3> value) {
             self.add(specdec::AppendStep{layer,
                                          {static_cast<int>(key[0]), key[1], key[2]},
                                          {static_cast<int>(value[0]), value[1], value[2]}});
           })
      .def("add_attend",
           [](Program& self, std::int64_t layer, std::int64_t num_heads, std::array<std::int64_t, 3> query, int out,
              std::array<double, 3> params, const Sinks& sinks) {
             self.add(specdec::AttendStep{layer, num_heads, {static_cast<int>(query[0]), query[1], query[2]}, out,
                                          static_cast<float>(params[0]), static_cast<float>(params[2]),
                                          static_cast<std::int64_t>(params[1]), pointer<const void>(sinks.first),
                                          static_cast<specdec::DType>(sinks.second)});
           })
      .def("add_gather", [](Program& self, int in, int out) { self.add(specdec::GatherStep{in, out}); })
      .def(
          "run", [](Program& self, const Addresses& at, const ForwardSizes& sizes) { self.run(forward(at, sizes)); },
          py::call_guard<py::gil_scoped_release>())
      .def("draft", &draft, py::call_guard<py::gil_scoped_release>())
      .def("verify", &verify, py::call_guard<py::gil_scoped_release>())
      .def("bytes_for", &Program::bytes_for)
      .def("release", &Program::release)
      .def_property_readonly("held_bytes", &Program::held_bytes)
      .def_property_readonly("seconds", &Program::seconds);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled ops of specdec_fast; call them through specdec_fast.ops.";
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  m.def("append_kv", &append_kv, ReleaseGil());
  m.def("compact_kv", &compact_kv, ReleaseGil());
  m.def("grouped_linear", &grouped_linear, ReleaseGil());
  m.def("linear", &linear, ReleaseGil());
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
  m.def("realign_kv", &realign_kv, ReleaseGil());
  m.def("verify_chain", &verify_chain, ReleaseGil());
  bind_program(m);
}
