// The only file that knows pybind11. No torch headers: addresses and sizes cross the border, the Python side
// (specdec_fast/ops/cpp.py) has checked shapes, dtypes and contiguity before, and the GIL is released meanwhile.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "verify_chain.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void verify_chain(std::uintptr_t logits, int dtype, std::int64_t num_rows, std::int64_t vocab_size,
                  std::int64_t row_stride, std::uintptr_t token_ids, std::uintptr_t cu_seqlens,
                  std::int64_t batch_size, std::uintptr_t target_tokens, std::uintptr_t num_accepted,
                  std::uintptr_t next_tokens, int num_threads) {
  const specdec::VerifyChainArgs args{pointer<const void>(logits),
                                      static_cast<specdec::DType>(dtype),
                                      num_rows,
                                      vocab_size,
                                      row_stride,
                                      pointer<const std::int64_t>(token_ids),
                                      pointer<const std::int32_t>(cu_seqlens),
                                      batch_size,
                                      num_threads};
  specdec::verify_chain(args, {pointer<std::int64_t>(target_tokens), pointer<std::int32_t>(num_accepted),
                               pointer<std::int64_t>(next_tokens)});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled ops of specdec_fast; call them through specdec_fast.ops.";
  m.def("verify_chain", &verify_chain, py::call_guard<py::gil_scoped_release>());
}
