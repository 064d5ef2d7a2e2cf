// Forward programs for Python; see bindings.cpp.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "program/drafting.h"
#include "program/program.h"
#include "program/tree_drafting.h"
#include "program/verifying.h"

namespace specdec {
namespace {

// place, dtype, buffer, address of a constant, immediate, offset, strides, length of the last axis
using OperandTuple =
    std::tuple<int, int, int, std::uintptr_t, float, std::int64_t, std::array<std::int64_t, kMaxRank>, std::int64_t>;

Operand operand(const OperandTuple& t) {
  return {static_cast<Operand::Place>(std::get<0>(t)), static_cast<DType>(std::get<1>(t)), std::get<2>(t),
          pointer<const char>(std::get<3>(t)), std::get<4>(t), std::get<5>(t), std::get<6>(t), std::get<7>(t)};
}

// Buffer, offset in bytes, stride of a head in elements.
using HeadsTuple = std::array<std::int64_t, 3>;

HeadsView heads_view(const HeadsTuple& t) { return {static_cast<int>(t[0]), t[1], t[2]}; }

using Addresses = std::array<std::uintptr_t, 12>;
using ForwardSizes = std::array<std::int64_t, 8>;
// Of the state slots: address of the calls' addresses, calls, slots, draft tokens for which there is room. All 0: none.
using StateTuple = std::array<std::int64_t, 4>;

StateSlots states_at(const StateTuple& t) {
  return {pointer<char* const>(static_cast<std::uintptr_t>(t[0])), t[1], t[2], t[3]};
}

// In the order of specdec_fast/program/cpp/executor.py.
Forward forward(const Addresses& at, const ForwardSizes& sizes, const StateTuple& states,
                const std::array<std::uintptr_t, 5>& recurrent) {
  const auto array = [&](int i) { return pointer<const std::int32_t>(recurrent[static_cast<std::size_t>(i)]); };
  return {sizes[0], sizes[1],
          pointer<const std::int64_t>(at[0]), pointer<const std::int64_t>(at[1]), pointer<const std::int64_t>(at[2]),
          pointer<const std::int32_t>(at[3]), pointer<const std::int32_t>(at[4]), pointer<const std::int32_t>(at[5]),
          pointer<const std::int32_t>(at[6]), sizes[2], sizes[3],
          pointer<const std::int32_t>(at[7]), sizes[4],
          {pointer<char* const>(at[8]), sizes[5], sizes[6]},
          pointer<void>(at[9]),
          static_cast<int>(sizes[7]), pointer<void>(at[10]), pointer<const void>(at[11]), states_at(states),
          {sizes[0], sizes[2], array(0), array(1), array(2), array(3), array(4)}};
}

// In the order of specdec_fast/program/cpp/executor.py: of the tables their address and sizes, then of the layers' pages.
// The last four describe the state slots, as StateTuple.
Pages pages_at(const std::array<std::int64_t, 10>& t) {
  return {pointer<const std::int32_t>(static_cast<std::uintptr_t>(t[0])), t[1], t[2],
          {pointer<char* const>(static_cast<std::uintptr_t>(t[3])), t[4], t[5]}, states_at({t[6], t[7], t[8], t[9]})};
}

// Place, start, count, length of the stored state, and rows that it stores.
using Spans = std::vector<std::array<std::int64_t, 5>>;

std::vector<Span> spans_of(const Spans& spans) {
  std::vector<Span> found;
  found.reserve(spans.size());
  for (const auto& [place, start, count, state_length, num_stored] : spans) {
    found.push_back({place, start, count, state_length, num_stored});
  }
  return found;
}

// dtype, width, number of ids that may be chosen; of a drafter with ids of its own also the address of the target's ids,
// and their number; if its rows take its own, the address of these and how many of the target's may be chosen
using ChoiceSizes = std::array<std::int64_t, 7>;

Choice choice_of(const ChoiceSizes& of, const Sampling* sampling) {
  return {static_cast<DType>(of[0]), of[1], of[2], sampling,
          pointer<const std::int64_t>(static_cast<std::uintptr_t>(of[3])), of[4],
          pointer<const std::int64_t>(static_cast<std::uintptr_t>(of[5])), of[6]};
}

// In the order of CarriedRows.
using CarriedTuple = std::tuple<std::uintptr_t, std::int64_t, Program*, std::int64_t,
                                std::vector<std::pair<std::uintptr_t, std::int64_t>>>;

DraftRequest draft_request(const Spans& spans, const std::vector<std::int64_t>& token_ids,
                           const std::vector<std::int64_t>& num_draft_tokens, const CarriedTuple& carried) {
  const auto& [first, row_bytes, projection, input_bytes, pieces] = carried;
  CarriedRows rows{pointer<const char>(first), row_bytes, projection, input_bytes, {}};
  for (const auto& [address, count] : pieces) rows.pieces.emplace_back(pointer<const char>(address), count);
  return {spans_of(spans), token_ids, num_draft_tokens, rows};
}

void draft_call(Program& program, const std::array<std::int64_t, 10>& pages, const Spans& spans,
                const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& num_draft_tokens,
                const CarriedTuple& carried, const ChoiceSizes& choice, const std::vector<std::uintptr_t>& sampling,
                int num_threads, std::uintptr_t chosen) {
  const Sampling rules = sampling_at(sampling);
  draft(program, pages_at(pages), draft_request(spans, token_ids, num_draft_tokens, carried),
        choice_of(choice, sampling.empty() ? nullptr : &rules), num_threads, pointer<std::int64_t>(chosen));
}

// Largest numbers of nodes, width, parents and ranks of a static tree (none: dynamic trees), temperature of greedy requests.
using TreeTuple = std::tuple<std::vector<std::int64_t>, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                             double>;

std::vector<std::int64_t> draft_trees_call(
    Program& program, const std::array<std::int64_t, 10>& pages, const Spans& spans,
    const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& depths, const CarriedTuple& carried,
    const TreeTuple& trees, const ChoiceSizes& choice, const std::vector<std::uintptr_t>& sampling, int num_threads,
    std::array<std::uintptr_t, 3> nodes) {
  const Sampling rules = sampling_at(sampling);
  const auto& [num_nodes, width, parents, ranks, temperature] = trees;
  const StaticTree shape(parents, ranks);
  return draft_trees(program, pages_at(pages), draft_request(spans, token_ids, depths, carried),
                     {num_nodes, width, parents.empty() ? nullptr : &shape, temperature},
                     choice_of(choice, sampling.empty() ? nullptr : &rules), num_threads,
                     {pointer<std::int64_t>(nodes[0]), pointer<std::int32_t>(nodes[1]), pointer<float>(nodes[2])});
}

std::tuple<std::vector<std::vector<std::int64_t>>, std::vector<std::vector<std::int32_t>>, double> verify_call(
    Program& program, const std::array<std::int64_t, 10>& pages, const Spans& spans,
    const std::vector<std::int64_t>& last_tokens, std::array<std::uintptr_t, 3> draft_tokens, const ChoiceSizes& choice,
    const std::vector<std::uintptr_t>& sampling, int num_threads, std::array<std::uintptr_t, 2> outputs) {
  const Sampling rules = sampling_at(sampling);
  Verified found = verify(
      program, pages_at(pages),
      {spans_of(spans), last_tokens, pointer<const std::int64_t>(draft_tokens[0]),
       static_cast<std::int64_t>(draft_tokens[1]), pointer<const std::int32_t>(draft_tokens[2])},
      choice_of(choice, sampling.empty() ? nullptr : &rules), num_threads, pointer<void>(outputs[0]),
      pointer<void>(outputs[1]));
  return {std::move(found.emissions), std::move(found.paths), found.seconds};
}

void bind_exchange(py::module_& m) {
  using Widths = std::vector<std::int64_t>;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();  // it waits for other processes
  py::class_<RankExchange>(m, "RankExchange")
      .def(py::init([](std::uintptr_t memory, std::int64_t chunk_bytes, int rank, int num_ranks, double timeout) {
        return new RankExchange(pointer<void>(memory), chunk_bytes, rank, num_ranks, timeout);
      }))
      .def_static("bytes_for", &RankExchange::bytes_for)
      .def("sum", [](RankExchange& self, int dtype, std::uintptr_t in, std::uintptr_t out, std::int64_t size) {
        self.sum(static_cast<DType>(dtype), pointer<const void>(in), pointer<void>(out), size);
      }, unlocked)
      .def("concatenate", [](RankExchange& self, std::uintptr_t in, std::uintptr_t out, std::int64_t num_rows,
                             const Widths& widths) {
        self.concatenate(pointer<const void>(in), pointer<void>(out), num_rows, widths);
      }, unlocked)
      .def("abort", &RankExchange::abort)
      .def("restart", &RankExchange::restart);
}

}  // namespace

void bind_program(py::module_& m) {
  using Sizes = std::vector<std::int64_t>;
  bind_exchange(m);
  py::class_<Program>(m, "Program")
      .def(py::init([](int dtype, const std::vector<std::array<std::int64_t, 3>>& shapes, const Sizes& bytes) {
        std::vector<KVShape> layers;
        for (const auto& [num_kv_heads, key_dim, value_dim] : shapes) layers.push_back({num_kv_heads, key_dim, value_dim});
        return new Program(static_cast<DType>(dtype), std::move(layers), bytes.at(0), bytes.at(1), bytes.at(2));
      }))
      .def("add_buffer",
           [](Program& self, int place, int domain, std::int64_t offset, std::int64_t row_bytes) {
             self.add(Buffer{static_cast<Buffer::Place>(place), static_cast<Domain>(domain), offset, row_bytes});
           })
      .def("add_row_op",
           [](Program& self, int domain, int code, std::array<std::int64_t, kMaxRank> shape,
              const std::vector<OperandTuple>& in, const OperandTuple& out, float scalar, bool by_position,
              std::int64_t table_rows) {
             RowOp op{static_cast<RowCode>(code), shape, {}, operand(out), scalar, by_position, table_rows};
             for (const OperandTuple& each : in) op.in.push_back(operand(each));
             self.add(op, static_cast<Domain>(domain));
           })
      .def("add_linear",
           [](Program& self, int dtype, int in, int out, std::int64_t in_offset, std::array<std::int64_t, 3> sizes,
              std::uintptr_t weight, std::uintptr_t bias, bool transposed) {
             self.add(LinearStep{static_cast<DType>(dtype), in, out, in_offset, sizes[0], sizes[1], sizes[2],
                                 pointer<const void>(weight), pointer<const void>(bias), transposed});
           })
      .def("add_packed_linear",
           [](Program& self, int dtype, int in, int out, std::int64_t in_offset, std::int64_t num_vectors,
              const PackedTuple& weight, std::uintptr_t bias) {
             self.add(PackedLinearStep{static_cast<DType>(dtype), in, out, in_offset, num_vectors, packed_weight(weight),
                                       pointer<const void>(bias)});
           })
      .def("add_grouped_linear",
           [](Program& self, int dtype, std::array<int, 3> buffers, std::array<std::int64_t, 2> offsets,
              std::array<std::int64_t, 5> sizes, std::uintptr_t weight, std::uintptr_t bias, bool transposed) {
             self.add(GroupedLinearStep{static_cast<DType>(dtype), buffers[0], buffers[1], buffers[2], offsets[0],
                                        offsets[1], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                                        pointer<const void>(weight), pointer<const void>(bias), transposed});
           })
      .def("add_grouped_packed_linear",
           [](Program& self, int dtype, std::array<int, 3> buffers, std::array<std::int64_t, 2> offsets,
              std::array<std::int64_t, 3> sizes, const PackedTuple& weight, std::uintptr_t bias) {
             self.add(GroupedPackedLinearStep{static_cast<DType>(dtype), buffers[0], buffers[1], buffers[2], offsets[0],
                                              offsets[1], sizes[0], sizes[1], sizes[2], packed_weight(weight),
                                              pointer<const void>(bias)});
           })
      .def("add_append",
           [](Program& self, std::int64_t layer, const HeadsTuple& key, const HeadsTuple& value) {
             self.add(AppendStep{layer, heads_view(key), heads_view(value)});
           })
      .def("add_attend",
           [](Program& self, std::int64_t layer, std::int64_t num_heads, const HeadsTuple& query, int out,
              std::array<double, 4> params, const Sinks& sinks) {
             self.add(AttendStep{layer, num_heads, heads_view(query), out,
                                 static_cast<float>(params[0]), static_cast<float>(params[2]),
                                 static_cast<std::int64_t>(params[1]), static_cast<std::int64_t>(params[3]),
                                 pointer<const void>(sinks.first), static_cast<DType>(sinks.second)});
           })
      .def("add_convolve",
           [](Program& self, std::array<std::int64_t, 4> step, std::int64_t in_offset,
              std::array<std::uintptr_t, 2> weights, std::array<std::int64_t, 3> sizes) {
             self.add(ConvolveStep{step[0], static_cast<DType>(step[1]), static_cast<int>(step[2]),
                                   static_cast<int>(step[3]), in_offset, pointer<const void>(weights[0]),
                                   pointer<const void>(weights[1]), sizes[0], sizes[1], sizes[2] != 0});
           })
      .def("add_attend_linearly",
           [](Program& self, std::array<std::int64_t, 3> step, const std::array<HeadsTuple, 5>& rows,
              std::array<bool, 3> flags, std::array<std::int64_t, 4> shape, std::array<double, 2> params,
              std::uintptr_t skip) {
             self.add(AttendLinearlyStep{step[0], static_cast<DType>(step[1]), heads_view(rows[0]), heads_view(rows[1]),
                                         heads_view(rows[2]), heads_view(rows[3]), heads_view(rows[4]),
                                         static_cast<int>(step[2]), flags[0], flags[1], flags[2], shape[0], shape[1],
                                         shape[2], shape[3], static_cast<float>(params[0]),
                                         static_cast<float>(params[1]), pointer<const float>(skip)});
           })
      .def("add_scan",
           [](Program& self, std::array<std::int64_t, 3> step, const std::array<HeadsTuple, 4>& rows,
              std::array<std::uintptr_t, 2> constants, std::array<std::int64_t, 5> sizes) {
             self.add(ScanStep{step[0], static_cast<DType>(step[1]), heads_view(rows[0]), heads_view(rows[1]),
                               heads_view(rows[2]), heads_view(rows[3]), static_cast<int>(step[2]),
                               pointer<const float>(constants[0]), pointer<const float>(constants[1]), sizes[0], sizes[1],
                               sizes[2], sizes[3], sizes[4]});
           })
      .def("add_exchange",
           [](Program& self, RankExchange& ranks, int dtype, int domain, std::array<int, 2> buffers, const Sizes& widths) {
             self.add(ExchangeStep{&ranks, static_cast<DType>(dtype), static_cast<Domain>(domain), buffers[0], buffers[1],
                                   widths});
           },
           py::keep_alive<1, 2>())
      .def("add_gather", [](Program& self, int in, int out) { self.add(GatherStep{in, out}); })
      .def(
          "run",
          [](Program& self, const Addresses& at, const ForwardSizes& sizes, const StateTuple& states,
             const std::array<std::uintptr_t, 5>& recurrent) { self.run(forward(at, sizes, states, recurrent)); },
          py::call_guard<py::gil_scoped_release>())
      .def("draft", &draft_call, py::call_guard<py::gil_scoped_release>())
      .def("draft_trees", &draft_trees_call, py::call_guard<py::gil_scoped_release>())
      .def("verify", &verify_call, py::call_guard<py::gil_scoped_release>())
      .def("bytes_for", &Program::bytes_for)
      .def("release", &Program::release)
      .def_property_readonly("held_bytes", &Program::held_bytes)
      .def_property_readonly("seconds", &Program::seconds);
}

}  // namespace specdec
