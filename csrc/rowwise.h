// What a forward program does to one row at a time: elementwise functions, reductions over the last axis, tables.
//
// A row's numbers are widened to fp32, computed one by one in a fixed order, and rounded to the dtype of the result after
// every operation, as PyTorch does. No other row is looked at, so its bits depend on it alone.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "dtype.h"

namespace specdec {

enum class RowCode : int {
  kCopy, kNeg, kAbs, kSquare, kSqrt, kRsqrt, kReciprocal, kExp, kSin, kCos, kSigmoid, kSilu, kTanh, kRelu, kGelu,
  kGeluTanh,                 // functions of one number; order as in specdec_fast/program/instructions.py
  kAdd, kSub, kMul, kDiv,    // of two
  kMean, kSum, kLayerNorm,   // over the last axis; the last takes weight, bias and epsilon (`scalar`)
  kPosition,                 // the row's position plus `scalar`
  kEmbedding,                // the table row of the row's token (or position plus `scalar`); in[0] is the table
};

constexpr int kMaxRank = 4;

// Where the numbers of a row are: `strides` in elements, one per axis of the operation, 0 where they are repeated.
struct Operand {
  enum class Place : int { kBuffer, kConstant, kImmediate };
  Place place;
  DType dtype;
  int buffer;              // kBuffer
  const char* constant;    // kConstant
  float immediate;         // kImmediate
  std::int64_t offset;     // elements from the beginning of the row, or of the constant
  std::array<std::int64_t, kMaxRank> strides;
  bool is_dense = false;   // side by side in the operation's order; set by `prepared`
};

struct RowOp {
  RowCode code;
  std::array<std::int64_t, kMaxRank> shape;  // of the inputs, per row; leading axes of 1 where there are fewer
  std::vector<Operand> in;                   // one to three
  Operand out;                               // of a reduction: the last axis has one number
  float scalar;
  bool by_position;         // kEmbedding
  std::int64_t table_rows;  // kEmbedding

  std::int64_t size() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
};

// fp32 working memory of one thread, for operations of up to `size` numbers.
struct RowScratch {
  explicit RowScratch(std::int64_t size) : loaded(3 * size), result(size), size(size) {}
  std::vector<float> loaded, result;
  std::int64_t size;
};

// Where a buffer is: rows in memory that all threads see, or one row at `offset` in each thread's own.
struct Location {
  char* base;  // null: a thread's own
  std::int64_t row_stride, offset;  // bytes
};

// Which row is computed, and with which buffers.
struct RowPlace {
  const Location* buffers;
  char* own;  // the thread's
  std::int64_t row, token_id, position;

  char* address(int buffer) const {
    const Location& location = buffers[buffer];
    return location.base == nullptr ? own + location.offset : location.base + row * location.row_stride;
  }
};

RowOp prepared(RowOp op);

// Takes a prepared operation. Throws std::out_of_range if the table has no such row.
void run_row_op(const RowOp& op, const RowPlace& place, RowScratch& scratch);

}  // namespace specdec
