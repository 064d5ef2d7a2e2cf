// The products of paged_attention: scores, and sums of weighted values. Included once per instruction set, between
// attention_tile.h and attention_kernel.h, which states the order of every sum.

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kVectors = 4;  // adjacent vectors of columns in a block of a product
constexpr std::int64_t kColumns = kVectors * kLanes;
constexpr std::int64_t kChunkBytes = 128;               // of a key: 64 such pieces of keys stay in the first-level cache
constexpr int kRowBlock = SPECDEC_LANES == 16 ? 6 : 2;  // rows of a block: as many as leave registers for the operands

// Rows of words, `stride` apart.
struct Matrix {
  float* data;
  std::int64_t stride;
};

// What a product is added to: zero, the number at the output, or that number times a factor.
enum class Start { kZero, kSum, kScaled };

// c[i, :] = start + sum over words k in [first, last) of a[i, k] * b[k, :], for kRows rows and kCount vectors of columns.
template <typename Product, int kRows, int kCount>
SPECDEC_INLINE void product_block(Matrix c, Start start, const float* factor, Matrix a, Matrix b, std::int64_t first,
                                  std::int64_t last) {
  Vector sums[kRows][kCount] = {};
  for (std::int64_t k = first; k < last; ++k) {
    Vector operands[kCount];
    for (int v = 0; v < kCount; ++v) operands[v] = load_as<Vector>(b.data + k * b.stride + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const auto weight = load_as<typename Product::Word>(a.data + i * a.stride + k);
      for (int v = 0; v < kCount; ++v) sums[i][v] = Product::add(sums[i][v], weight, operands[v]);
    }
  }
  // Unrolled before GCC 12 decides where the sums are kept: it would leave them in memory, depending on what else is inlined.
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) {
      float* to = c.data + i * c.stride + v * kLanes;
      if (start == Start::kSum) sums[i][v] += load_as<Vector>(to);
      if (start == Start::kScaled) sums[i][v] = multiply_add(load_as<Vector>(to), splat(factor[i]), sums[i][v]);
      store_as(to, sums[i][v]);
    }
  }
}

// The same for up to kVectors vectors.
template <typename Product, int kRows>
SPECDEC_INLINE void product_columns(std::int64_t count, Matrix c, Start start, const float* factor, Matrix a, Matrix b,
                                    std::int64_t first, std::int64_t last) {
  switch (count) {
    case 1: return product_block<Product, kRows, 1>(c, start, factor, a, b, first, last);
    case 2: return product_block<Product, kRows, 2>(c, start, factor, a, b, first, last);
    case 3: return product_block<Product, kRows, 3>(c, start, factor, a, b, first, last);
    default: return product_block<Product, kRows, kVectors>(c, start, factor, a, b, first, last);
  }
}

// Call body(number of rows as a constant, first row) for blocks of rows.
template <typename Body>
SPECDEC_INLINE void for_row_blocks(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  for (; i + kRowBlock <= end; i += kRowBlock) body(std::integral_constant<int, kRowBlock>{}, i);
  for (; i + 2 <= end; i += 2) body(std::integral_constant<int, 2>{}, i);
  for (; i < end; ++i) body(std::integral_constant<int, 1>{}, i);
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
