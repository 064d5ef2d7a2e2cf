// From spans of positions to the arrays that a forward reads, so that Python lays nothing out in a step of the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace specdec {

// A page pool; every sequence has a place in its tables.
struct Pages {
  const std::int32_t* tables;  // [num_places, max_pages]
  std::int64_t num_places, max_pages;
  KVPages kv;
  StateSlots states = {};  // the slot of a place has its number
};

// Consecutive positions of the sequence at `place`: `start` to `start + count - 1`.
struct Span {
  std::int64_t place, start, count;
  // For recurrent layers, see RecurrentRows.
  std::int64_t state_length = 0, num_stored = 0;

  // The span of one draft token after this one, of which no state is stored.
  Span behind() const {
    return {place, start + count, 1, state_length + num_stored, 0};
  }
};

// The arrays of one forward over `spans`, sequence after sequence. Throws std::out_of_range if a span lies outside the
// tables.
//
// With `parents` every span is a tree: its first row is the root, and row i + 1 is node i, whose parent is node parents[i],
// or the root if that is -1. `parents` has the nodes of all spans, span after span, and every parent comes before its
// children: otherwise the constructor throws std::invalid_argument. The rows stand in consecutive places of the cache, as in
// a chain, but a row's position is that of its parent plus 1.
class SpanLayout {
 public:
  enum class Logits { kAllRows, kLastRows };  // the logits of all rows, or of the last row of each span

  SpanLayout(const Pages& pages, const std::vector<Span>& spans, Logits wanted, const std::int32_t* parents = nullptr);

  std::int64_t num_rows() const { return static_cast<std::int64_t>(positions_.size()); }
  const std::int32_t* cu_seqlens() const { return cu_seqlens_.data(); }
  // Of each row its parent's number in the span, -1 for the first row; null without trees.
  const std::int32_t* row_parents() const { return row_parents_.empty() ? nullptr : row_parents_.data(); }
  // This object owns the arrays, so it must outlive the forward.
  Forward forward(const std::int64_t* token_ids, void* logits, int num_threads) const;

 private:
  void lay_out_trees(const std::vector<Span>& spans, const std::int32_t* parents);

  Pages pages_;
  std::int64_t width_ = 0;  // pages per row of the block table, as many as these spans need
  std::vector<std::int64_t> positions_, logit_rows_;
  std::vector<std::int32_t> slot_mapping_, block_table_, cu_seqlens_, seqused_k_;
  std::vector<std::int32_t> state_slots_, state_lengths_, num_replayed_, num_stored_;
  std::int64_t tree_words_ = 0;
  std::vector<std::int32_t> row_parents_, tree_mask_;
};

}  // namespace specdec
