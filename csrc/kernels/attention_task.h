// One task of paged_attention: what it works on, and which positions its rows see.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/multiversion.h"
#include "ops/paged_attention.h"

namespace specdec {

constexpr std::int64_t kTile = 64;         // positions reduced together
constexpr std::int64_t kFewRows = 16;      // at least so many query rows share a tile's loads
constexpr std::int64_t kMostVectors = 256;  // at most so many (row, head) pairs: their sums stay in the second-level cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Query rows of one sequence and one KV head.
struct Task {
  std::int64_t sequence;
  std::int64_t first_row;  // in the sequence
  std::int64_t num_rows;
  std::int64_t kv_head;
};

// The rows of a task. A vector is one pair of a row and a head of the group.
struct Rows {
  std::int64_t first_query;  // row of the whole batch
  std::int64_t prefix;       // KV entries before the sequence's rows
  std::int64_t first_row;
  std::int64_t num_vectors;
  std::int64_t only;  // the one row that is folded, or kAll
};
constexpr std::int64_t kAll = -1;

// Working memory of one thread, in floats and pairs of bf16 numbers (attention_tile.h).
struct Scratch {
  std::int64_t words;                        // words of a query
  std::int64_t columns;                      // columns of an output: value_dim, rounded up to whole vectors
  std::vector<float> query;                  // [vectors, words]
  std::vector<float> accumulated;            // [vectors, columns]
  std::vector<float> maximum, sum, rescale;  // [vectors]
  std::vector<float> scores;                 // [vectors, kTile]
  std::vector<float> keys;                   // [words, kTile]
  std::vector<float> values;                 // [kTile, columns]
  std::vector<float> zeros;                  // [value_dim]: the value of a hidden position
  std::vector<std::int64_t> path;            // of a tree's row: where the entries from the first row of its sequence on are

  Scratch(std::int64_t vectors, std::int64_t words, std::int64_t columns)
      : words(words),
        columns(columns),
        query(vectors * words),
        accumulated(vectors * columns),
        maximum(vectors),
        sum(vectors),
        rescale(vectors),
        scores(vectors * kTile),
        keys((words + 1) * kTile),  // the last word of an odd head_dim is written as two
        values(kTile * columns),
        zeros(columns) {}
};

// The kernel for one instruction set. Each has a source file of its own (attention_portable.cpp and its neighbours).
struct AttentionKernel {
  std::array<void (*)(const PagedAttentionArgs&, Scratch&, const Task&, const Task*), 3> run;  // by DType
  std::array<std::int64_t, 3> numbers;                                            // numbers in a word, by DType
  std::int64_t lanes;
  std::int64_t padding;  // vectors after a task's last one that are read and written
};

namespace attention_portable {
extern const AttentionKernel kKernel, kTileKernel;
}
#ifdef SPECDEC_X86_64_LEVELS
namespace attention_x86_64_v3 {
extern const AttentionKernel kKernel;
}
namespace attention_x86_64_v4 {
extern const AttentionKernel kKernel;
}
namespace attention_avx512_bf16 {
extern const AttentionKernel kKernel, kTileKernel;
}
#endif

// The attention sink of a head.
inline float sink_of(const PagedAttentionArgs& args, std::int64_t head) {
  if (args.sinks_dtype == DType::kFloat32) return static_cast<const float*>(args.sinks)[head];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(args.sinks)[head];
  return args.sinks_dtype == DType::kFloat16 ? Float16::load(bits) : BFloat16::load(bits);
}

// First position that a row at `position` sees. It never falls from one position to the next.
SPECDEC_INLINE std::int64_t first_visible(const PagedAttentionArgs& args, std::int64_t position) {
  if (args.attention_chunk > 0) return position / args.attention_chunk * args.attention_chunk;
  return args.sliding_window > 0 ? std::max<std::int64_t>(0, position - args.sliding_window + 1) : 0;
}

SPECDEC_INLINE bool tree_bit(const PagedAttentionArgs& args, std::int64_t query_row, std::int64_t row) {
  return args.tree_mask[query_row * args.tree_words + row / kTreeMaskBits] >> (row % kTreeMaskBits) & 1;
}

// All rows of a task.
SPECDEC_INLINE Rows rows_of(const PagedAttentionArgs& args, const Task& task) {
  const std::int64_t begin = args.cu_seqlens_q[task.sequence], group = args.num_heads / args.num_kv_heads;
  const std::int64_t prefix = args.seqused_k[task.sequence] - (args.cu_seqlens_q[task.sequence + 1] - begin);
  return {begin + task.first_row, prefix, task.first_row, task.num_rows * group, kAll};
}

// The position of a row. In a tree it is given by the row's depth, the number of its ancestors among the sequence's rows.
inline std::int64_t position_of(const PagedAttentionArgs& args, const Rows& rows, std::int64_t row) {
  if (!args.tree_mask) return rows.prefix + rows.first_row + row;
  std::int64_t position = rows.prefix - 1;  // the row's own bit counts no ancestor
  for (std::int64_t other = 0; other <= rows.first_row + row; ++other) {
    position += tree_bit(args, rows.first_query + row, other);
  }
  return position;
}

// First position that this row or a later one of the task may see. A tree's rows are not sorted by their positions.
SPECDEC_INLINE std::int64_t first_seen(const PagedAttentionArgs& args, const Rows& rows, std::int64_t row) {
  return first_visible(args, args.tree_mask ? rows.prefix : rows.prefix + rows.first_row + row);
}

// The entries of a task's positions from `first` on: where each is, in numbers of heads from the beginning of a cache.
class Entries {
 public:
  SPECDEC_INLINE Entries(const PagedAttentionArgs& args, const Task& task, std::int64_t first)
      : table_(args.block_table + task.sequence * args.max_pages),
        pages_(table_ + first / args.page_size),
        in_page_(first % args.page_size),
        page_size_(args.page_size),
        num_heads_(args.num_kv_heads),
        kv_head_(task.kv_head) {}

  // Returns the entry of the current position and goes on to the next one.
  SPECDEC_INLINE std::int64_t next() {
    const std::int64_t slot = *pages_ * page_size_ + in_page_;
    if (++in_page_ == page_size_) in_page_ = 0, ++pages_;
    return slot * num_heads_ + kv_head_;
  }

  // Returns the entry at place `place` of the sequence.
  std::int64_t at(std::int64_t place) const {
    return (table_[place / page_size_] * page_size_ + place % page_size_) * num_heads_ + kv_head_;
  }

 private:
  const std::int32_t *table_, *pages_;
  std::int64_t in_page_, page_size_, num_heads_, kv_head_;
};

// One past the last position that a row of the task may see.
SPECDEC_INLINE std::int64_t end_seen(const Rows& rows, std::int64_t row) { return rows.prefix + rows.first_row + row + 1; }

// The range of the task's rows that are folded and see any position of the tile: the first, and one past the last. In a
// tree any row may.
SPECDEC_INLINE std::pair<std::int64_t, std::int64_t> rows_that_see(const PagedAttentionArgs& args, const Rows& rows,
                                                                  std::int64_t num_rows, std::int64_t tile) {
  if (rows.only != kAll) return {rows.only, rows.only + 1};
  if (args.tree_mask) return {0, num_rows};
  const std::int64_t first = std::clamp<std::int64_t>(tile - rows.prefix - rows.first_row, 0, num_rows);
  const std::int64_t last = tile + kTile - 1;  // position of the tile
  std::int64_t end;                           // one past the last position that sees it
  if (args.attention_chunk > 0) {
    end = (last / args.attention_chunk + 1) * args.attention_chunk;
  } else if (args.sliding_window > 0) {
    end = last + args.sliding_window;
  } else {
    return {first, num_rows};
  }
  return {first, std::clamp(end - rows.prefix - rows.first_row, first, num_rows)};
}

// A tile's mask with bits first to last - 1 set; both bounds are clamped to the tile.
SPECDEC_INLINE std::uint64_t bits(std::int64_t first, std::int64_t last) {
  first = std::clamp<std::int64_t>(first, 0, kTile);
  last = std::clamp<std::int64_t>(last, 0, kTile);
  if (first >= last) return 0;
  return (~std::uint64_t{0} >> (kTile - (last - first))) << first;
}

// The positions of the tile that the row sees, one bit each.
inline std::uint64_t visible(const PagedAttentionArgs& args, const Rows& rows, std::int64_t row, std::int64_t tile) {
  const bool sees_all = args.sliding_window == 0 && args.attention_chunk == 0;
  if (sees_all && tile + kTile <= rows.prefix) return ~std::uint64_t{0};
  const std::int64_t position = position_of(args, rows, row);
  return bits(first_visible(args, position) - tile, position + 1 - tile);
}

}  // namespace specdec
