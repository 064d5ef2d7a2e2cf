// The operations of a forward program on one row: elementwise functions, reductions over the last axis, and tables.
//
// An operation widens a row's numbers to fp32, computes in a fixed order, and rounds to the dtype of the result, as PyTorch
// does. It reads no other row, so a row's bits depend on that row alone. Truth values are 0 and 1. Places along an axis, as
// topk returns them, token ids and positions are whole numbers below 2^24, which fp32 represents exactly.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

enum class RowCode : int {
  kCopy, kNeg, kAbs, kSquare, kSqrt, kRsqrt, kReciprocal, kExp, kSin, kCos, kSigmoid, kSilu, kTanh, kRelu, kGelu,
  kGeluTanh, kFloor, kLog, kLog1p, kExpm1,  // functions of one number; specdec_fast/program/plan/ir.py has the same order
  kAdd, kSub, kMul, kDiv, kMaximum, kMinimum,  // functions of two numbers
  kEq, kNe, kLt, kLe, kGt, kGe,                // comparisons of two numbers: 1 or 0
  kWhere,                    // the second operand where the first is not 0, else the third
  kMean, kSum, kLayerNorm,   // over the last axis; kLayerNorm takes weight, bias and epsilon (`scalar`)
  kSoftmax,                  // over the last axis
  kTopK,                     // places of the largest numbers along the last axis, sorted if `scalar` is not 0
  kArgmax,                   // the first place of the largest number along the last axis
  kGather,                   // the first operand's numbers at the places in the second
  kScatter,                  // the first operand, with the third at the places in the second
  kTokenId, kPosition,       // the row's token id or position, plus `scalar`
  kEmbedding,                // a row of the table in[0]: number in[1] if there is one, else that of the token, or of the
                             // position plus `scalar`
  kEmbeddingPart,            // the row of the table in[0] with number token minus `scalar`; zeros if the table has none
};

constexpr int kMaxRank = 4;

// The numbers of a row. `strides` are in elements, one per axis of the operation, and 0 where numbers are repeated.
// `length` is that of the last axis, which may differ from the operation's.
struct Operand {
  enum class Place : int { kBuffer, kConstant, kImmediate };
  Place place;
  DType dtype;
  int buffer;              // kBuffer
  const char* constant;    // kConstant
  float immediate;         // kImmediate
  std::int64_t offset;     // elements from the beginning of the row or of the constant
  std::array<std::int64_t, kMaxRank> strides;
  std::int64_t length;
  bool is_dense = false;   // contiguous in the operation's order; `prepared` sets it
};

struct RowOp {
  RowCode code;
  std::array<std::int64_t, kMaxRank> shape;  // of a row; if there are fewer axes, the leading ones are 1
  std::vector<Operand> in;                   // at most three operands
  Operand out;
  float scalar;
  bool by_position;         // kEmbedding
  std::int64_t table_rows;  // kEmbedding

  std::int64_t num_vectors() const { return shape[0] * shape[1] * shape[2]; }  // vectors along the last axis
  std::int64_t size() const;                                             // numbers in the largest operand
};

// fp32 working memory of one thread, for operations of up to `size` numbers.
struct RowScratch {
  explicit RowScratch(std::int64_t size) : loaded(3 * size), result(size), size(size) {}
  std::vector<float> loaded, result;
  std::int64_t size;

  static std::int64_t bytes(std::int64_t size) { return 4 * size * static_cast<std::int64_t>(sizeof(float)); }
};

// The address of a buffer: rows in memory that all threads share, or one row at `offset` in each thread's own memory.
struct Location {
  char* base;  // null: the thread's own memory
  std::int64_t row_stride, offset;  // bytes
};

// The row to compute, and the buffers.
struct RowPlace {
  const Location* buffers;
  char* own;  // the thread's own memory
  std::int64_t row, token_id, position;

  char* address(int buffer) const {
    const Location& location = buffers[buffer];
    return location.base == nullptr ? own + location.offset : location.base + row * location.row_stride;
  }
};

RowOp prepared(RowOp op);

// Runs a prepared operation on one row. Throws std::out_of_range if an index lies outside a table or an axis.
void run_row_op(const RowOp& op, const RowPlace& place, RowScratch& scratch);

}  // namespace specdec
