#include "program/spans.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "ops/paged_attention.h"

namespace specdec {

namespace {

void check(const Pages& pages, const Span& span) {
  const std::int64_t stop = span.start + span.count;
  if (span.place < 0 || span.place >= pages.num_places || span.start < 0 || span.count < 1 ||
      stop > pages.max_pages * pages.kv.page_size) {
    throw std::out_of_range("positions " + std::to_string(span.start) + " to " + std::to_string(stop - 1) + " of place " +
                            std::to_string(span.place) + " lie outside tables of " + std::to_string(pages.num_places) +
                            " places and " + std::to_string(pages.max_pages) + " pages");
  }
}

}  // namespace

SpanLayout::SpanLayout(const Pages& pages, const std::vector<Span>& spans, Logits wanted, const std::int32_t* parents)
    : pages_(pages) {
  for (const Span& span : spans) {
    check(pages, span);
    width_ = std::max(width_, (span.start + span.count - 1) / pages.kv.page_size + 1);
  }
  cu_seqlens_.push_back(0);
  for (const Span& span : spans) {
    const std::int64_t stop = span.start + span.count;
    const std::int32_t* table = pages.tables + span.place * pages.max_pages;
    block_table_.insert(block_table_.end(), table, table + width_);
    for (std::int64_t position = span.start; position < stop; ++position) {
      positions_.push_back(position);
      slot_mapping_.push_back(static_cast<std::int32_t>(table[position / pages.kv.page_size] * pages.kv.page_size +
                                                        position % pages.kv.page_size));
      if (wanted == Logits::kAllRows || position == stop - 1) logit_rows_.push_back(num_rows() - 1);
    }
    cu_seqlens_.push_back(static_cast<std::int32_t>(num_rows()));
    seqused_k_.push_back(static_cast<std::int32_t>(stop));
    if (pages.states.num_calls == 0) continue;
    state_slots_.push_back(static_cast<std::int32_t>(span.place));
    state_lengths_.push_back(static_cast<std::int32_t>(span.state_length));
    num_replayed_.push_back(static_cast<std::int32_t>(span.start - span.state_length));
    num_stored_.push_back(static_cast<std::int32_t>(span.num_stored));
  }
  if (parents != nullptr) lay_out_trees(spans, parents);
}

void SpanLayout::lay_out_trees(const std::vector<Span>& spans, const std::int32_t* parents) {
  std::int64_t most_rows = 0;
  for (const Span& span : spans) most_rows = std::max(most_rows, span.count);
  tree_words_ = (most_rows + kTreeMaskBits - 1) / kTreeMaskBits;
  tree_mask_.resize(static_cast<std::size_t>(num_rows() * tree_words_));
  row_parents_.reserve(positions_.size());
  std::int64_t first = 0;
  for (const Span& span : spans) {
    for (std::int64_t row = 0; row < span.count; ++row) {
      const std::int64_t parent = row ? *parents++ + std::int64_t{1} : -1;
      if (row && (parent < 0 || parent >= row)) {
        throw std::invalid_argument("the parent of node " + std::to_string(row - 1) + " of a tree is " +
                                    std::to_string(parent - 1) + "; expected -1 or an earlier node");
      }
      row_parents_.push_back(static_cast<std::int32_t>(parent));
      std::int32_t* mask = tree_mask_.data() + (first + row) * tree_words_;
      if (row) {
        positions_[first + row] = positions_[first + parent] + 1;
        std::copy_n(tree_mask_.data() + (first + parent) * tree_words_, tree_words_, mask);
      }
      const std::uint32_t own = std::uint32_t{1} << (row % kTreeMaskBits);
      mask[row / kTreeMaskBits] = static_cast<std::int32_t>(static_cast<std::uint32_t>(mask[row / kTreeMaskBits]) | own);
    }
    first += span.count;
  }
}

Forward SpanLayout::forward(const std::int64_t* token_ids, void* logits, int num_threads) const {
  Forward forward{
          num_rows(),
          static_cast<std::int64_t>(logit_rows_.size()),
          token_ids,
          positions_.data(),
          logit_rows_.data(),
          slot_mapping_.data(),
          block_table_.data(),
          cu_seqlens_.data(),
          seqused_k_.data(),
          static_cast<std::int64_t>(seqused_k_.size()),
          width_,
          tree_words_ ? tree_mask_.data() : nullptr,
          tree_words_,
          pages_.kv,
          logits,
          num_threads};
  forward.states = pages_.states;
  if (!state_slots_.empty()) {
    forward.recurrent = {num_rows(),           forward.batch_size,   cu_seqlens_.data(), state_slots_.data(),
                         state_lengths_.data(), num_replayed_.data(), num_stored_.data()};
  }
  return forward;
}

}  // namespace specdec
