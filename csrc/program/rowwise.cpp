#include "program/rowwise.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/conversions.h"
#include "program/row_functions.h"

namespace specdec {
namespace {

std::int64_t place_of(float index, std::int64_t size) {
  if (!(index >= 0.0f && index < static_cast<float>(size))) {
    throw std::out_of_range("index " + std::to_string(index) + " lies outside an axis of " + std::to_string(size));
  }
  return static_cast<std::int64_t>(index);
}

float widen_one(DType dtype, const char* from) {
  float number = 0;
  widen_all(dtype, from, &number, 1);
  return number;
}

using Shape = std::array<std::int64_t, kMaxRank>;

// The shape of an operand: that of the operation, except for the last axis.
Shape shape_of(const Operand& operand, const RowOp& op) { return {op.shape[0], op.shape[1], op.shape[2], operand.length}; }

bool is_dense(const Operand& operand, const Shape& shape) {
  std::int64_t expected = 1;
  for (int axis = kMaxRank - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && operand.strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

// Calls visit(index, offset in elements) for every vector along the last axis.
template <typename Visit>
void for_each_vector(const Shape& shape, const Shape& strides, Visit visit) {
  std::int64_t vector = 0;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      for (std::int64_t k = 0; k < shape[2]; ++k) {
        visit(vector++, i * strides[0] + j * strides[1] + k * strides[2]);
      }
    }
  }
}

char* address(const Operand& operand, const RowPlace& place) {
  const std::int64_t bytes = operand.offset * item_size(operand.dtype);
  if (operand.place == Operand::Place::kConstant) return const_cast<char*>(operand.constant) + bytes;
  return place.address(operand.buffer) + bytes;
}

// Returns the operand's numbers contiguously: in place, or gathered in `memory`.
const float* load(const Operand& operand, const Shape& shape, const RowPlace& place, float* memory) {
  const std::int64_t size = shape[0] * shape[1] * shape[2] * shape[3];
  if (operand.place == Operand::Place::kImmediate) {
    std::fill(memory, memory + size, operand.immediate);
    return memory;
  }
  const char* from = address(operand, place);
  if (operand.is_dense) {
    if (operand.dtype == DType::kFloat32) return reinterpret_cast<const float*>(from);
    widen_all(operand.dtype, from, memory, size);
    return memory;
  }
  const std::int64_t length = shape[3], stride = operand.strides[3], item = item_size(operand.dtype);
  for_each_vector(shape, operand.strides, [&](std::int64_t vector, std::int64_t offset) {
    float* to = memory + vector * length;
    const char* numbers = from + offset * item;
    if (stride == 1) {
      widen_all(operand.dtype, numbers, to, length);
    } else if (stride == 0) {
      std::fill(to, to + length, widen_one(operand.dtype, numbers));
    } else {
      for (std::int64_t i = 0; i < length; ++i) to[i] = widen_one(operand.dtype, numbers + i * stride * item);
    }
  });
  return memory;
}

void store(const Operand& operand, const Shape& shape, const float* result, const RowPlace& place) {
  char* to = address(operand, place);
  const std::int64_t length = shape[3], stride = operand.strides[3], item = item_size(operand.dtype);
  if (operand.is_dense) {
    narrow_all(operand.dtype, result, to, shape[0] * shape[1] * shape[2] * length);
    return;
  }
  for_each_vector(shape, operand.strides, [&](std::int64_t vector, std::int64_t offset) {
    const float* numbers = result + vector * length;
    if (stride == 1) {
      narrow_all(operand.dtype, numbers, to + offset * item, length);
    } else {
      for (std::int64_t i = 0; i < length; ++i) {
        narrow_all(operand.dtype, numbers + i, to + (offset + i * stride) * item, 1);
      }
    }
  });
}

// Runs an operation over the last axis, vector by vector.
void run_over_vectors(const RowOp& op, const float* const* in, float* result) {
  const std::int64_t length = op.in[0].length, others = op.in.size() > 1 ? op.in[1].length : 0;
  for (std::int64_t vector = 0; vector < op.num_vectors(); ++vector, result += op.out.length) {
    const float *numbers = in[0] + vector * length, *second = in[1] + vector * others;
    switch (op.code) {
      case RowCode::kSum: result[0] = sum(numbers, length); break;
      case RowCode::kMean: result[0] = sum(numbers, length) / static_cast<float>(length); break;
      case RowCode::kSoftmax: softmax(numbers, result, length); break;
      case RowCode::kTopK: top_k(numbers, length, result, op.out.length, op.scalar != 0.0f); break;
      case RowCode::kArgmax: result[0] = static_cast<float>(first_largest(numbers, length)); break;
      case RowCode::kGather:
        for (std::int64_t i = 0; i < others; ++i) result[i] = numbers[place_of(second[i], length)];
        break;
      case RowCode::kScatter:
        std::copy(numbers, numbers + length, result);
        for (std::int64_t i = 0; i < others; ++i) result[place_of(second[i], length)] = in[2][vector * others + i];
        break;
      default: layer_norm(numbers, second, in[2] + vector * length, op.scalar, result, length);
    }
  }
}

// The row of a table that an embedding takes, and what it is, for the message if the table has no such row.
std::int64_t row_of_table(const RowOp& op, const RowPlace& place, const char*& kind) {
  if (op.in.size() > 1) {
    kind = "index ";
    return static_cast<std::int64_t>(widen_one(op.in[1].dtype, address(op.in[1], place)));
  }
  kind = op.by_position ? "position " : "token id ";
  return op.by_position ? place.position + static_cast<std::int64_t>(op.scalar) : place.token_id;
}

void embed(const RowOp& op, const RowPlace& place) {
  const char* kind = nullptr;
  const std::int64_t row = row_of_table(op, place, kind);
  if (row < 0 || row >= op.table_rows) {
    throw std::out_of_range(kind + std::to_string(row) + " lies outside a table of " + std::to_string(op.table_rows) +
                            " rows");
  }
  const std::int64_t bytes = op.num_vectors() * op.out.length * item_size(op.out.dtype);
  std::memcpy(address(op.out, place), op.in[0].constant + row * bytes, static_cast<std::size_t>(bytes));
}

// A table that has the rows of a part of the vocabulary.
void embed_part(const RowOp& op, const RowPlace& place) {
  const std::int64_t row = place.token_id - static_cast<std::int64_t>(op.scalar);
  const auto bytes = static_cast<std::size_t>(op.num_vectors() * op.out.length * item_size(op.out.dtype));
  if (row < 0 || row >= op.table_rows) {
    std::memset(address(op.out, place), 0, bytes);
  } else {
    std::memcpy(address(op.out, place), op.in[0].constant + static_cast<std::size_t>(row) * bytes, bytes);
  }
}

}  // namespace

std::int64_t RowOp::size() const {
  std::int64_t longest = out.length;
  for (const Operand& operand : in) longest = std::max(longest, operand.length);
  return num_vectors() * longest;
}

RowOp prepared(RowOp op) {
  for (Operand& operand : op.in) operand.is_dense = is_dense(operand, shape_of(operand, op));
  op.out.is_dense = is_dense(op.out, shape_of(op.out, op));
  return op;
}

void run_row_op(const RowOp& op, const RowPlace& place, RowScratch& scratch) {
  if (op.code == RowCode::kEmbedding) return embed(op, place);
  if (op.code == RowCode::kEmbeddingPart) return embed_part(op, place);
  const Shape results = shape_of(op.out, op);
  if (op.code == RowCode::kPosition || op.code == RowCode::kTokenId) {
    const std::int64_t number = op.code == RowCode::kPosition ? place.position : place.token_id;
    scratch.result[0] = static_cast<float>(number + static_cast<std::int64_t>(op.scalar));
    return store(op.out, results, scratch.result.data(), place);
  }
  const float* in[3] = {};
  for (std::size_t i = 0; i < op.in.size(); ++i) {
    float* memory = scratch.loaded.data() + static_cast<std::int64_t>(i) * scratch.size;
    in[i] = load(op.in[i], shape_of(op.in[i], op), place, memory);
  }
  const bool in_place = op.out.dtype == DType::kFloat32 && op.out.is_dense;
  float* result = in_place ? reinterpret_cast<float*>(address(op.out, place)) : scratch.result.data();
  if (op.code >= RowCode::kMean) {
    run_over_vectors(op, in, result);
  } else {
    run_elementwise(op.code, in[0], in[1], in[2], result, op.num_vectors() * op.out.length);
  }
  if (!in_place) store(op.out, results, result, place);
}

}  // namespace specdec
