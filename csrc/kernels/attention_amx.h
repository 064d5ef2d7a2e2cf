// paged_attention in bf16 on tiles of AMX (amx_tiles.h), for any number of vectors. Included once per
// instruction set, before attention_kernel.h. What is multiplied is laid out as for pairs of bf16 numbers (attention_tile.h):
// keys and values are right operands, queries and weights left ones, all of them where they are.
//
// A score adds 32 numbers of head_dim per instruction, an output 32 positions of a tile, always from the lowest index on.
// Blocks of vectors and the height of a tile decide only which rows are multiplied by one instruction, so no bit of a row
// depends on them. Few vectors take the same instructions as many.

namespace specdec {
namespace SPECDEC_ISA {

constexpr std::int64_t kStepWords = kTilePairs;  // pairs of numbers that one instruction adds
constexpr std::int64_t kTileColumns = 16;        // columns of a tile of keys, values or sums

// Pairs of bf16 numbers, multiplied in tiles.
template <typename Class>
struct TilePairs {
  using Tiles = Class;
  using Word = std::uint32_t;
  static constexpr std::int64_t kNumbers = 2;
  static constexpr bool kTiles = true;
};

// The products of kM tiles of rows of `left` with kN tiles of columns of `right`, words [first, last), which are whole
// steps: tiles 0 and 1 hold the sums of the first rows, tiles 2 and 3 those of the rows after them.
template <int kM, int kN, typename Tiles>
SPECDEC_INLINE void multiply_tiles(Tiles& tiles, std::int64_t height, Matrix left, Matrix right, std::int64_t first,
                                   std::int64_t last) {
  tiles.template zero<0>();
  if constexpr (kN == 2) tiles.template zero<1>();
  if constexpr (kM == 2) tiles.template zero<2>();
  if constexpr (kM == 2 && kN == 2) tiles.template zero<3>();
  const std::int64_t left_bytes = left.stride * 4, right_bytes = right.stride * 4;
  for (std::int64_t k = first; k < last; k += kStepWords) {
    const float* columns = right.data + k * right.stride;
    tiles.template load<6>(columns, right_bytes);
    tiles.template load<4>(left.data + k, left_bytes);
    tiles.template multiply_add<0, 4, 6>();
    if constexpr (kN == 2) {
      tiles.template load<7>(columns + kTileColumns, right_bytes);
      tiles.template multiply_add<1, 4, 7>();
    }
    if constexpr (kM == 2) {
      tiles.template load<5>(left.data + height * left.stride + k, left_bytes);
      tiles.template multiply_add<2, 5, 6>();
    }
    if constexpr (kM == 2 && kN == 2) tiles.template multiply_add<3, 5, 7>();
  }
}

template <int kM, int kN, typename Tiles>
SPECDEC_INLINE void store_tiles(const Tiles& tiles, std::int64_t height, Matrix to) {
  const std::int64_t bytes = to.stride * 4;
  tiles.template store<0>(to.data, bytes);
  if constexpr (kN == 2) tiles.template store<1>(to.data + kTileColumns, bytes);
  float* second = to.data + height * to.stride;
  if constexpr (kM == 2) tiles.template store<2>(second, bytes);
  if constexpr (kM == 2 && kN == 2) tiles.template store<3>(second + kTileColumns, bytes);
}

// Writes the products of `num_rows` rows, at most two tiles, and `num_columns` columns, one tile or two. Rows up to the end
// of a tile are read and written, too.
template <typename Tiles>
SPECDEC_INLINE void product_tiles(Tiles& tiles, std::int64_t height, std::int64_t num_rows, std::int64_t num_columns, Matrix to,
                                  Matrix left, Matrix right, std::pair<std::int64_t, std::int64_t> words) {
  const auto multiply = [&](auto m, auto n) {
    multiply_tiles<m(), n()>(tiles, height, left, right, words.first, words.second);
    store_tiles<m(), n()>(tiles, height, to);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  if (num_rows > height) {
    num_columns > kTileColumns ? multiply(two, two) : multiply(two, one);
  } else {
    num_columns > kTileColumns ? multiply(one, two) : multiply(one, one);
  }
}

// Lays out a tile, and fetches the next one if there is any. With AVX-512 every line of the keys is read once.
template <typename Product>
SPECDEC_INLINE void load_pairs(const PagedAttentionArgs& args, Scratch& scratch, const Tile<BFloat16, Product>& tile,
                               const Tile<BFloat16, Product>* next) {
  for (std::int64_t j = tile.begin / 2 * 2; j < tile.end; j += 2) {
    for (std::int64_t i = j; next && i < j + 2; ++i) {
      prefetch(next->keys[i], args.head_dim * 2);
      prefetch(next->values[i], args.value_dim);
    }
    load_values<BFloat16, Product>(tile.values + j, args.value_dim, scratch.values.data() + j / 2 * scratch.columns);
  }
#if SPECDEC_LANES == 16
  for (std::int64_t j = tile.first_lane; j < tile.end_lane; j += kLanes) {
    for (std::int64_t w = 0; w < args.head_dim / 2; w += kLanes) {
      Words words[kLanes];
      transpose_square(tile.keys + j, w, words);
      for (int i = 0; i < kLanes; ++i) store_keys<BFloat16, Product>(words[i], w + i, scratch.keys.data() + j);
    }
  }
#else
  load_keys<BFloat16, Product>(tile.keys, tile.first_lane, tile.end_lane, args.head_dim, scratch.keys.data());
#endif
}

// Folds positions [first, last) of the loaded tile into the task's vectors that see at least one of them.
template <typename Product>
SPECDEC_INLINE void fold_pairs(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t first,
                               std::int64_t last, std::uint64_t broken) {
  const std::int64_t group = args.num_heads / args.num_kv_heads, tile = first / kTile * kTile;
  const auto [first_row, end_row] = rows_that_see(args, rows, rows.num_vectors / group, tile);
  const std::int64_t begin = first_row * group, end = end_row * group;
  if (begin == end) return;
  const std::int64_t height = std::min<std::int64_t>(kTileHeight, end - begin);
  typename Product::Tiles tiles;
  tiles.configure(kTileColumns, height);
  const auto rows_of_block = [&](std::int64_t i) { return std::min(2 * height, end - i); };
  const auto seen_by = [&](std::int64_t i) { return std::min(last, end_seen(rows, (i + rows_of_block(i) - 1) / group)) - tile; };
  for (std::int64_t i = begin; i < end; i += 2 * height) {
    const Matrix query{scratch.query.data() + i * scratch.words, scratch.words};
    for (std::int64_t j = 0; j < seen_by(i); j += 2 * kTileColumns) {
      product_tiles(tiles, height, rows_of_block(i), seen_by(i) - j, {scratch.scores.data() + i * kTile + j, kTile}, query,
                    {scratch.keys.data() + j, kTile}, {0, args.head_dim / 2});
    }
  }
  weigh_many<Product>(args, scratch, rows, tile, begin, end);
  invalidate(args, scratch, rows, tile, begin, end, broken);
  alignas(64) float products[2 * kTileHeight * 2 * kTileColumns];
  for (std::int64_t i = begin; i < end; i += 2 * height) {
    const std::int64_t from = std::max(first, first_seen(args, rows, i / group)) - tile;
    // Positions of a step that no row of the block sees have the weight 0, and their values are finite.
    const std::pair<std::int64_t, std::int64_t> words{from / 2 / kStepWords * kStepWords, (seen_by(i) + 1) / 2};
    for (std::int64_t d = 0; d < args.value_dim; d += 2 * kTileColumns) {
      const std::int64_t columns = std::min(2 * kTileColumns, args.value_dim - d);
      product_tiles(tiles, height, rows_of_block(i), columns, {products, 2 * kTileColumns},
                    {scratch.scores.data() + i * kTile, kTile}, {scratch.values.data() + d, scratch.columns}, words);
      for (std::int64_t row = 0; row < rows_of_block(i); ++row) {
        float* sums = scratch.accumulated.data() + (i + row) * scratch.columns + d;
        for (std::int64_t c = 0; c < columns; c += kLanes) {
          const Vector before = load_as<Vector>(sums + c), added = load_as<Vector>(products + row * 2 * kTileColumns + c);
          store_as(sums + c, multiply_add(before, splat(scratch.rescale[i + row]), added));
        }
      }
    }
  }
  tiles.release();
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
