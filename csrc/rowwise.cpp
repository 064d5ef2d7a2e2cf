#include "rowwise.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "exponential.h"
#include "multiversion.h"

namespace specdec {
namespace {

#define SPECDEC_INLINE inline __attribute__((always_inline))

// exp(x) within 2 units in the last place, 2^n in two factors so that no exponent overflows. A NaN stays one.
SPECDEC_INLINE float exp_of(float x) {
  float bounded = x < -104.0f ? -104.0f : x;  // beyond these: 0 and infinity, in fp32
  bounded = bounded > 89.0f ? 89.0f : bounded;
  float shifted;
  const float e = exp_remainder(bounded, shifted);
  const std::int32_t whole = static_cast<std::int32_t>(bit_cast<std::uint32_t>(shifted) - 0x4b400000u);
  const std::int32_t half = whole >> 1;
  const float first = bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = bit_cast<float>(static_cast<std::uint32_t>(whole - half + 127) << 23);
  return e * first * second;
}

// Within 2 units in the last place: near 0 by a polynomial (least squares on [0, 0.625^2], reweighted to equal errors),
// else by exp.
SPECDEC_INLINE float tanh_of(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.716876592e-3f;
  p = p * z + 2.065045014e-2f;
  p = p * z - 5.374346301e-2f;
  p = p * z + 1.333149076e-1f;
  p = p * z - 3.333328366e-1f;
  const float near = x + x * z * p;
  const float far = 1.0f - 2.0f / (exp_of(2.0f * magnitude) + 1.0f);
  const float beyond = x < 0.0f ? -far : far;
  return magnitude < 0.625f ? near : beyond;
}

using Function = void (*)(const float* a, const float* b, float* out, std::int64_t size);

#define SPECDEC_ROW_FUNCTION(name, expression)                                                             \
  SPECDEC_MULTIVERSION                                                                                     \
  void name(const float* __restrict a, [[maybe_unused]] const float* __restrict b, float* __restrict out,  \
            std::int64_t size) {                                                                           \
    for (std::int64_t i = 0; i < size; ++i) {                                                              \
      const float x = a[i];                                                                                \
      out[i] = expression;                                                                                 \
    }                                                                                                      \
  }

SPECDEC_ROW_FUNCTION(copy, x)
SPECDEC_ROW_FUNCTION(neg, -x)
SPECDEC_ROW_FUNCTION(absolute, std::fabs(x))
SPECDEC_ROW_FUNCTION(square, x * x)
SPECDEC_ROW_FUNCTION(square_root, std::sqrt(x))
SPECDEC_ROW_FUNCTION(reciprocal_root, 1.0f / std::sqrt(x))
SPECDEC_ROW_FUNCTION(reciprocal, 1.0f / x)
SPECDEC_ROW_FUNCTION(exponential, exp_of(x))
SPECDEC_ROW_FUNCTION(sine, std::sin(x))
SPECDEC_ROW_FUNCTION(cosine, std::cos(x))
SPECDEC_ROW_FUNCTION(sigmoid, 1.0f / (1.0f + exp_of(-x)))
SPECDEC_ROW_FUNCTION(silu, x / (1.0f + exp_of(-x)))
SPECDEC_ROW_FUNCTION(tanh_function, tanh_of(x))
SPECDEC_ROW_FUNCTION(relu, x < 0.0f ? 0.0f : x)
SPECDEC_ROW_FUNCTION(gelu, 0.5f * x * (1.0f + std::erf(x * 0.707106781f)))
SPECDEC_ROW_FUNCTION(gelu_tanh, 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * (x * x * x)))))
SPECDEC_ROW_FUNCTION(add, x + b[i])
SPECDEC_ROW_FUNCTION(sub, x - b[i])
SPECDEC_ROW_FUNCTION(mul, x* b[i])
SPECDEC_ROW_FUNCTION(div, x / b[i])
#undef SPECDEC_ROW_FUNCTION

constexpr Function kFunctions[] = {copy, neg,  absolute,      square, square_root, reciprocal_root, reciprocal,
                                   exponential, sine, cosine, sigmoid, silu, tanh_function, relu, gelu, gelu_tanh,
                                   add,  sub,  mul,           div};
static_assert(sizeof(kFunctions) / sizeof(Function) == static_cast<int>(RowCode::kMean), "one per code");

constexpr int kLanes = 16;  // of a sum: the same on every instruction set, so that they agree

// Lane l adds numbers l, l + 16, ...; the lanes are then added in pairs.
template <typename Term>
SPECDEC_INLINE float sum_of(std::int64_t size, Term term) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < size; ++lane) lanes[lane] += term(i + lane);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

SPECDEC_MULTIVERSION
float sum(const float* a, std::int64_t size) {
  return sum_of(size, [a](std::int64_t i) { return a[i]; });
}

SPECDEC_MULTIVERSION
float squared_distance(const float* a, float from, std::int64_t size) {
  return sum_of(size, [a, from](std::int64_t i) { return (a[i] - from) * (a[i] - from); });
}

// weight and bias are laid out like a.
SPECDEC_MULTIVERSION
void scale_and_shift(const float* __restrict a, const float* __restrict weight, const float* __restrict bias,
                     float mean, float scale, float* __restrict out, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) out[i] = (a[i] - mean) * scale * weight[i] + bias[i];
}

template <typename Format>
SPECDEC_INLINE void widen(const void* from, float* __restrict to, std::int64_t size) {
  const auto* numbers = static_cast<const typename Format::Storage*>(from);
  for (std::int64_t i = 0; i < size; ++i) to[i] = Format::load(numbers[i]);
}
template <typename Format>
SPECDEC_INLINE void narrow(const float* __restrict from, void* to, std::int64_t size) {
  auto* numbers = static_cast<typename Format::Storage*>(to);
  for (std::int64_t i = 0; i < size; ++i) numbers[i] = Format::store(from[i]);
}

SPECDEC_MULTIVERSION
void widen_half(const void* from, float* to, std::int64_t size) { widen<Float16>(from, to, size); }
SPECDEC_MULTIVERSION
void widen_bfloat(const void* from, float* to, std::int64_t size) { widen<BFloat16>(from, to, size); }
SPECDEC_MULTIVERSION
void narrow_half(const float* from, void* to, std::int64_t size) { narrow<Float16>(from, to, size); }
SPECDEC_MULTIVERSION
void narrow_bfloat(const float* from, void* to, std::int64_t size) { narrow<BFloat16>(from, to, size); }

void widen_all(DType dtype, const void* from, float* to, std::int64_t size) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float)); break;
    case DType::kFloat16: widen_half(from, to, size); break;
    case DType::kBFloat16: widen_bfloat(from, to, size); break;
  }
}

void narrow_all(DType dtype, const float* from, void* to, std::int64_t size) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float)); break;
    case DType::kFloat16: narrow_half(from, to, size); break;
    case DType::kBFloat16: narrow_bfloat(from, to, size); break;
  }
}

float widen_one(DType dtype, const char* from) {
  float number = 0;
  widen_all(dtype, from, &number, 1);
  return number;
}

using Shape = std::array<std::int64_t, kMaxRank>;

bool is_dense(const Operand& operand, const Shape& shape) {
  std::int64_t expected = 1;
  for (int axis = kMaxRank - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && operand.strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

// Calls visit(line, offset in elements) for every line along the last axis.
template <typename Visit>
void for_each_line(const Shape& shape, const Shape& strides, Visit visit) {
  std::int64_t line = 0;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      for (std::int64_t k = 0; k < shape[2]; ++k) {
        visit(line++, i * strides[0] + j * strides[1] + k * strides[2]);
      }
    }
  }
}

char* address(const Operand& operand, const RowPlace& place) {
  const std::int64_t bytes = operand.offset * item_size(operand.dtype);
  if (operand.place == Operand::Place::kConstant) return const_cast<char*>(operand.constant) + bytes;
  return place.address(operand.buffer) + bytes;
}

// Returns the operand's numbers side by side: where they are, or gathered in `memory`.
const float* load(const Operand& operand, const Shape& shape, std::int64_t size, const RowPlace& place, float* memory) {
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
  for_each_line(shape, operand.strides, [&](std::int64_t line, std::int64_t offset) {
    float* to = memory + line * length;
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
  for_each_line(shape, operand.strides, [&](std::int64_t line, std::int64_t offset) {
    const float* numbers = result + line * length;
    if (stride == 1) {
      narrow_all(operand.dtype, numbers, to + offset * item, length);
    } else {
      for (std::int64_t i = 0; i < length; ++i) {
        narrow_all(operand.dtype, numbers + i, to + (offset + i * stride) * item, 1);
      }
    }
  });
}

void reduce(const RowOp& op, const float* const* in, float* result) {
  const std::int64_t length = op.shape[3], lines = op.size() / length;
  for (std::int64_t line = 0; line < lines; ++line) {
    const float* numbers = in[0] + line * length;
    if (op.code == RowCode::kSum) {
      result[line] = sum(numbers, length);
    } else if (op.code == RowCode::kMean) {
      result[line] = sum(numbers, length) / static_cast<float>(length);
    } else {
      const float mean = sum(numbers, length) / static_cast<float>(length);
      const float variance = squared_distance(numbers, mean, length) / static_cast<float>(length);
      scale_and_shift(numbers, in[1] + line * length, in[2] + line * length, mean, 1.0f / std::sqrt(variance + op.scalar),
                      result + line * length, length);
    }
  }
}

void embed(const RowOp& op, const RowPlace& place) {
  const std::int64_t row = op.by_position ? place.position + static_cast<std::int64_t>(op.scalar) : place.token_id;
  if (row < 0 || row >= op.table_rows) {
    throw std::out_of_range((op.by_position ? "position " : "token id ") + std::to_string(row) +
                            " lies outside a table of " + std::to_string(op.table_rows) + " rows");
  }
  const std::int64_t bytes = op.size() * item_size(op.out.dtype);
  std::memcpy(address(op.out, place), op.in[0].constant + row * bytes, static_cast<std::size_t>(bytes));
}

}  // namespace

RowOp prepared(RowOp op) {
  for (Operand& operand : op.in) operand.is_dense = is_dense(operand, op.shape);
  Shape results = op.shape;
  if (op.code == RowCode::kMean || op.code == RowCode::kSum) results[3] = 1;
  op.out.is_dense = is_dense(op.out, results);
  return op;
}

void run_row_op(const RowOp& op, const RowPlace& place, RowScratch& scratch) {
  if (op.code == RowCode::kEmbedding) return embed(op, place);
  Shape results = op.shape;
  if (op.code == RowCode::kPosition) {
    scratch.result[0] = static_cast<float>(place.position) + op.scalar;
    return store(op.out, results, scratch.result.data(), place);
  }
  const std::int64_t size = op.size();
  const float* in[3] = {};
  for (std::size_t i = 0; i < op.in.size(); ++i) {
    in[i] = load(op.in[i], op.shape, size, place, scratch.loaded.data() + static_cast<std::int64_t>(i) * scratch.size);
  }
  if (op.code == RowCode::kMean || op.code == RowCode::kSum) results[3] = 1;
  const bool in_place = op.out.dtype == DType::kFloat32 && op.out.is_dense;
  float* result = in_place ? reinterpret_cast<float*>(address(op.out, place)) : scratch.result.data();
  if (op.code >= RowCode::kMean) {
    reduce(op, in, result);
  } else {
    kFunctions[static_cast<int>(op.code)](in[0], in[1], result, size);
  }
  if (!in_place) store(op.out, results, result, place);
}

}  // namespace specdec
