#include "program/spans.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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

SpanLayout::SpanLayout(const Pages& pages, const std::vector<Span>& spans, Logits wanted) : pages_(pages) {
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
  }
}

Forward SpanLayout::forward(const std::int64_t* token_ids, void* logits, int num_threads) const {
  return {num_rows(),
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
          nullptr,
          0,
          pages_.kv,
          logits,
          num_threads};
}

}  // namespace specdec
