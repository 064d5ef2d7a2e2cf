// The arithmetic of paged_attention, included once per instruction set: SPECDEC_ISA names the namespace, SPECDEC_LANES
// the number of floats in its vectors, SPECDEC_TILES the class of tiles of a version that has them (attention_amx.h). Each
// version has to be compiled as a whole, because GCC splits a vector type for the instruction set of the function that
// contains it before it inlines that function.
//
// Every sum has one fixed order, whatever the number of rows. A score adds its products chunk by chunk of head_dim; an
// output adds its weighted values tile by tile of positions. Both begin at the lowest index. When weights are summed,
// position j of a tile is always in the same vector lane. So no bit depends on how rows are divided into blocks and tasks,
// nor on whether positions that a row does not see are skipped: their weight is 0. Every chunk and every tile has a sum of
// its own, because one long chain would lose two to three times as much to rounding.

namespace specdec {
namespace SPECDEC_ISA {

// Fold positions [first, last) of the loaded tile into the task's vectors that see at least one of them.
template <typename Type, typename Product>
SPECDEC_INLINE void fold_tile(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t first,
                              std::int64_t last, std::uint64_t broken) {
  const std::int64_t group = args.num_heads / args.num_kv_heads, tile = first / kTile * kTile;
  const auto [first_row, end_row] = rows_that_see(args, rows, rows.num_vectors / group, tile);
  const std::int64_t begin = first_row * group, end = end_row * group;
  constexpr std::int64_t step = Product::kNumbers;
  constexpr std::int64_t chunk = kChunkBytes / static_cast<std::int64_t>(sizeof(typename Type::Storage)) / step;
  const std::int64_t words = (args.head_dim + step - 1) / step;
  const Matrix query{scratch.query.data(), scratch.words}, scores{scratch.scores.data(), kTile};
  const Matrix keys{scratch.keys.data(), kTile}, values{scratch.values.data(), scratch.columns};
  const Matrix sums{scratch.accumulated.data(), scratch.columns};
  const auto at = [](Matrix m, std::int64_t row, std::int64_t column) {
    return Matrix{m.data + row * m.stride + column, m.stride};
  };
  for (std::int64_t k = 0; k < words; k += chunk) {
    for_row_blocks(begin, end, [&](auto count, std::int64_t i) {
      const std::int64_t seen = std::min(last, end_seen(rows, (i + count - 1) / group)) - tile;
      for (std::int64_t j = 0; j < seen; j += kColumns) {
        product_columns<Product, count()>((std::min(seen - j, kColumns) + kLanes - 1) / kLanes, at(scores, i, j),
                                          k ? Start::kSum : Start::kZero, nullptr, at(query, i, 0), at(keys, 0, j), k,
                                          std::min(k + chunk, words));
      }
    });
  }
  weigh_many<Product>(args, scratch, rows, tile, begin, end);
  invalidate(args, scratch, rows, tile, begin, end, broken);
  for (std::int64_t d = 0; d < scratch.columns; d += kColumns) {
    const std::int64_t vectors = std::min(scratch.columns - d, kColumns) / kLanes;
    for_row_blocks(begin, end, [&](auto count, std::int64_t i) {
      const std::int64_t from = std::max(first, first_seen(args, rows, i / group)) - tile;
      const std::int64_t seen = std::min(last, end_seen(rows, (i + count - 1) / group)) - tile;
      product_columns<Product, count()>(vectors, at(sums, i, d), Start::kScaled, scratch.rescale.data() + i,
                                        at(scores, i, 0), at(values, 0, d), from / step, (seen + step - 1) / step);
    });
  }
}

// The same for few vectors, whose products read the tile where it is stored. Not inlined, for the reason of weigh_many.
template <typename Type, typename Product>
__attribute__((noinline)) void fold_few(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows, std::int64_t first,
                             Tile<Type, Product>& tile, const Tile<Type, Product>& next) {
  const std::int64_t group = args.num_heads / args.num_kv_heads, in_tile = first - tile.begin;
  const auto [first_row, end_row] = rows_that_see(args, rows, rows.num_vectors / group, in_tile);
  const std::int64_t begin = first_row * group, end = end_row * group;
  for_few_blocks(begin, end, [&](auto count, std::int64_t i) {
    const Matrix query{scratch.query.data() + i * scratch.words, scratch.words};
    const std::int64_t words = args.head_dim * static_cast<std::int64_t>(sizeof(typename Type::Storage)) / 4;
    for (std::int64_t j = tile.first_lane; j < tile.end_lane; j += kLanes) {
      score_block<Type, Product, count()>({scratch.scores.data() + i * kTile + j, kTile}, query, tile.keys + j, next.keys + j,
                                          words);
    }
  });
  weigh<Product>(args, scratch, rows, in_tile, begin, end);
  constexpr std::int64_t step = Product::kNumbers;
  bool known_finite = false;
  for_few_blocks(begin, end, [&](auto count, std::int64_t i) {
    const Matrix sums{scratch.accumulated.data() + i * scratch.columns, scratch.columns};
    for (std::int64_t d = 0; d < args.value_dim;) {
      const auto block = [&](auto vectors) {
        return value_block<Type, Product, count(), vectors()>(sums, scratch.rescale.data() + i,
                                                              {scratch.scores.data() + i * kTile, kTile}, tile.values, next.values, d,
                                                              tile.begin / step, (tile.end + step - 1) / step, known_finite);
      };
      const bool whole = d + kColumns <= args.value_dim;
      constexpr int unit = ValueUnit<Type, Product>::kCount;
      if (whole ? block(std::integral_constant<int, kVectors>{}) : block(std::integral_constant<int, unit>{})) {
        d += whole ? kColumns : unit * kLanes;
      } else {
        invalidate(args, scratch, rows, in_tile, begin, end, tile.replace_broken(args.value_dim, scratch));
        known_finite = true;
      }
    }
  });
}

// Set the queries and sums of a task's vectors to their initial values.
template <typename Type, typename Product>
SPECDEC_INLINE void load_queries(const PagedAttentionArgs& args, Scratch& scratch, const Rows& rows,
                                 std::int64_t first_head) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads, head_dim = args.head_dim;
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    const std::int64_t head = first_head + i % group;
    const Storage* query = static_cast<const Storage*>(args.query) +
                           (rows.first_query + i / group) * args.stride_query_row + head * args.stride_query_head;
    float* to = scratch.query.data() + i * scratch.words;
    if constexpr (Product::kNumbers == 2) {
      to[scratch.words - 1] = 0.0f;  // an odd head_dim fills half of the last word
      std::memcpy(to, query, static_cast<std::size_t>(head_dim) * sizeof(Storage));
    } else {
      for (std::int64_t d = 0; d < head_dim; ++d) to[d] = Type::load(query[d]) * args.scale;
    }
    // A sink enters the softmax before the first entry: a weight of e^(sink - sink) = 1, and no value.
    scratch.maximum[i] = args.sinks ? sink_of(args, head) : -kInfinity;
    scratch.sum[i] = args.sinks ? 1.0f : 0.0f;
  }
  std::fill_n(scratch.accumulated.begin(), rows.num_vectors * scratch.columns, 0.0f);
}

// One past the last position that a row of a task of a chain sees.
SPECDEC_INLINE std::int64_t context_of(const Task& task, const Rows& rows) {
  return rows.prefix + task.first_row + task.num_rows;
}

// Fold positions [first, end) into the rows, and fetch the beginning of the next task if there is any.
template <typename Type, typename Product>
void fold(const PagedAttentionArgs& args, Scratch& scratch, const Task& task, const Rows& rows, std::int64_t first,
          std::int64_t end, const Task* next_task) {
  const std::int64_t group = args.num_heads / args.num_kv_heads;
  const bool few = !Product::kTiles && are_few<Type, Product>(args, rows.only == kAll ? rows.num_vectors : group);
  if (first >= end) return;
  Tile<Type, Product> tile = tile_of<Type, Product>(args, scratch, task, rows, first, end);
  while (first < end) {
    const std::int64_t next_first = (first / kTile + 1) * kTile, last = std::min(next_first, end);
    Tile<Type, Product> next = tile;
    if (next_first < end) {
      next = tile_of<Type, Product>(args, scratch, task, rows, next_first, end);
    } else if (next_task) {
      const Rows next_rows = rows_of(args, *next_task);
      next = tile_of<Type, Product>(args, scratch, *next_task, next_rows, first_seen(args, next_rows, 0),
                                    context_of(*next_task, next_rows));
    }
    if (few) {
      if constexpr (!Product::kTiles) fold_few<Type, Product>(args, scratch, rows, first, tile, next);
    } else {
      const std::uint64_t broken = tile.replace_broken(args.value_dim, scratch);
      // A prompt's rows share a tile, and its products take longer than fetching it.
      const auto* fetched = task.num_rows < kFewRows ? &next : nullptr;
      if constexpr (Product::kTiles) {
        load_pairs<Product>(args, scratch, tile, fetched);
        fold_pairs<Product>(args, scratch, rows, first, last, broken);
      } else {
        load_tile<Type, Product>(args, scratch, tile, fetched);
        fold_tile<Type, Product>(args, scratch, rows, first, last, broken);
      }
    }
    tile = next, first = next_first;
  }
}

// The rows of a tree share the tiles before them. The other positions are folded into one row after the other, from the
// entries of its own path: so each position is in the tile and the lane that it has in a chain.
template <typename Type, typename Product>
void fold_tree(const PagedAttentionArgs& args, Scratch& scratch, const Task& task, const Rows& rows) {
  const std::int64_t shared_end = rows.prefix / kTile * kTile;
  fold<Type, Product>(args, scratch, task, rows, first_seen(args, rows, 0), shared_end, nullptr);
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    scratch.path.clear();
    for (std::int64_t other = 0; other <= rows.first_row + row; ++other) {
      if (tree_bit(args, rows.first_query + row, other)) scratch.path.push_back(rows.prefix + other);
    }
    Rows one = rows;
    one.only = row;
    const std::int64_t end = rows.prefix + static_cast<std::int64_t>(scratch.path.size());
    fold<Type, Product>(args, scratch, task, one, std::max(shared_end, first_visible(args, end - 1)), end, nullptr);
  }
}

template <typename Type, typename Product>
void run_task(const PagedAttentionArgs& args, Scratch& scratch, const Task& task, const Task* next_task) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads, first_head = task.kv_head * group;
  const Rows rows = rows_of(args, task);
  load_queries<Type, Product>(args, scratch, rows, first_head);
  if (args.tree_mask) {
    fold_tree<Type, Product>(args, scratch, task, rows);
  } else {
    fold<Type, Product>(args, scratch, task, rows, first_seen(args, rows, 0), context_of(task, rows), next_task);
  }
  for (std::int64_t i = 0; i < rows.num_vectors; ++i) {
    Storage* out = static_cast<Storage*>(args.out) +
                   ((rows.first_query + i / group) * args.num_heads + first_head + i % group) * args.value_dim;
    const float* sums = scratch.accumulated.data() + i * scratch.columns;
    // Plus 0, because the sign of a zero depends on which positions were skipped.
    for (std::int64_t d = 0; d < args.value_dim; ++d) out[d] = Type::store(sums[d] / scratch.sum[i] + 0.0f);
  }
}

#ifdef SPECDEC_DOT_BF16
using ProductOfBFloat16 = Pairs;
#else
using ProductOfBFloat16 = Singles;
#endif

constexpr AttentionKernel kKernel = {
    {run_task<Float32, Singles>, run_task<Float16, Singles>, run_task<BFloat16, ProductOfBFloat16>},  // by DType
    {Singles::kNumbers, Singles::kNumbers, ProductOfBFloat16::kNumbers},
    kLanes,
    0};

#ifdef SPECDEC_TILES
// bf16 in tiles if heads fill them. Only the call's shape decides, so all rows of such heads have bits of tiles.
template <typename Tiles>
void run_tiles(const PagedAttentionArgs& args, Scratch& scratch, const Task& task, const Task* next_task) {
  const bool whole = args.head_dim % (2 * kStepWords) == 0 && args.value_dim % kTileColumns == 0;
  const auto run = whole ? run_task<BFloat16, TilePairs<Tiles>> : run_task<BFloat16, ProductOfBFloat16>;
  run(args, scratch, task, next_task);
}

constexpr AttentionKernel kTileKernel = {
    {kKernel.run[0], kKernel.run[1], run_tiles<SPECDEC_TILES>}, kKernel.numbers, kLanes, kTileHeight - 1};
#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec
