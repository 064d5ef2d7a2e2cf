// What a forward program does to one row at a time: elementwise functions, reductions over the last axis, tables.
//
// A row's numbers are widened to fp32, computed one by one in a fixed order, and rounded to the dtype of the result after
// every operation, as PyTorch does. No other row is looked at, so its bits depend on it alone. Truth values are 0 and 1;
// places along an axis, which topk finds, are whole numbers below 2^24, so fp32 has them exactly.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

enum class RowCode : int {
  kCopy, kNeg, kAbs, kSquare, kSqrt, kRsqrt, kReciprocal, kExp, kSin, kCos, kSigmoid, kSilu, kTanh, kRelu, kGelu,
  kGeluTanh,                 // functions of one number; order as in specdec_fast/program/ir.py
  kAdd, kSub, kMul, kDiv, kMaximum, kMinimum,  // of two
  kEq, kNe, kLt, kLe, kGt, kGe,                // of two: 1 where it holds, else 0
  kWhere,                    // the second where the first is not 0, else the third
  kMean, kSum, kLayerNorm,   // over the last axis; the last takes weight, bias and epsilon (`scalar`)
  kSoftmax,                  // over the last axis
  kTopK,                     // along the last axis: where its largest numbers stand, in order if `scalar` is not 0
  kGather,                   // the numbers of the first at the places that the second tells
  kScatter,                  // the first, but at the places that the second tells the third
  kPosition,                 // the row's position plus `scalar`
  kEmbedding,                // the table row of the row's token (or position plus `scalar`); in[0] is the table
};

constexpr int kMaxRank = 4;

// Where the numbers of a row are: `strides` in elements, one per axis of the operation, 0 where they are repeated.
// `length`: of the last axis, which need not be the operation's.
struct Operand {
  enum class Place : int { kBuffer, kConstant, kImmediate };
  Place place;
  DType dtype;
  int buffer;              // kBuffer
  const char* constant;    // kConstant
  float immediate;         // kImmediate
  std::int64_t offset;     // elements from the beginning of the row, or of the constant
  std::array<std::int64_t, kMaxRank> strides;
  std::int64_t length;
  bool is_dense = false;   // side by side in the operation's order; set by `prepared`
};

struct RowOp {
  RowCode code;
  std::array<std::int64_t, kMaxRank> shape;  // per row; leading axes of 1 where there are fewer
  std::vector<Operand> in;                   // one to three
  Operand out;
  float scalar;
  bool by_position;         // kEmbedding
  std::int64_t table_rows;  // kEmbedding

  std::int64_t lines() const { return shape[0] * shape[1] * shape[2]; }  // along the last axis
  std::int64_t size() const;                                             // numbers of the largest operand
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

// Takes a prepared operation. Throws std::out_of_range if a table or an axis has no such place.
void run_row_op(const RowOp& op, const RowPlace& place, RowScratch& scratch);

}  // namespace specdec
