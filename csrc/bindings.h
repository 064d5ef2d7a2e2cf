// What the bindings of the ops and those of forward programs share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

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

// `addresses`: of its arrays in the order of Sampling, none for greedy decoding.
inline Sampling sampling_at(const std::vector<std::uintptr_t>& addresses) {
  if (addresses.empty()) return {};
  return {pointer<const double>(addresses.at(0)),       pointer<const std::int32_t>(addresses.at(1)),
          pointer<const double>(addresses.at(2)),       pointer<const double>(addresses.at(3)),
          pointer<const double>(addresses.at(4)),       pointer<const std::int64_t>(addresses.at(5)),
          pointer<const std::int64_t>(addresses.at(6)), pointer<const std::int64_t>(addresses.at(7)),
          pointer<const std::int32_t>(addresses.at(8))};
}

}  // namespace specdec
