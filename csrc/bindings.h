// What the bindings of the ops and those of forward programs share.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/quantized_linear.h"
#include "ops/sampling.h"

namespace specdec {

namespace py = pybind11;

// Adds the class of forward programs to a module.
void bind_program(py::module_& m);

using Sinks = std::pair<std::uintptr_t, int>;  // address, or 0 for none, and dtype

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Addresses of codes, table, scales, minima, super-scales and super-minima (0 for none); inputs, outputs, inputs of a block and of a group; the kind of
// the codes, the dtype of the scales, and whether rows are rounded.
using PackedTuple = std::pair<std::array<std::uintptr_t, 6>, std::array<std::int64_t, 7>>;

inline PackedWeight packed_weight(const PackedTuple& weight) {
  const auto& [tensors, sizes] = weight;
  return {sizes[0], sizes[1], sizes[2], sizes[3], static_cast<CodeKind>(sizes[4]), sizes[6] != 0,
          pointer<const std::uint32_t>(tensors[0]), pointer<const float>(tensors[1]), static_cast<DType>(sizes[5]),
          pointer<const void>(tensors[2]), pointer<const void>(tensors[3]), pointer<const std::uint16_t>(tensors[4]),
          pointer<const std::uint16_t>(tensors[5])};
}

// `addresses`: of its arrays in the order of Sampling, 0 for those it lacks; none for greedy decoding.
inline Sampling sampling_at(const std::vector<std::uintptr_t>& addresses) {
  if (addresses.empty()) return {};
  return {pointer<const double>(addresses.at(0)),       pointer<const std::int32_t>(addresses.at(1)),
          pointer<const double>(addresses.at(2)),       pointer<const double>(addresses.at(3)),
          pointer<const double>(addresses.at(4)),       pointer<const std::int64_t>(addresses.at(5)),
          pointer<const std::int64_t>(addresses.at(6)), pointer<const std::int64_t>(addresses.at(7)),
          pointer<const std::int32_t>(addresses.at(8)), pointer<const double>(addresses.at(9)),
          pointer<const double>(addresses.at(10)),      pointer<const std::int32_t>(addresses.at(11)),
          pointer<const std::int64_t>(addresses.at(12)), pointer<const double>(addresses.at(13)),
          pointer<const std::int32_t>(addresses.at(14)), pointer<const std::int32_t>(addresses.at(15))};
}

}  // namespace specdec
