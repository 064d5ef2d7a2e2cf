// Sums and concatenations over the processes of one host that compute a sharded model, through memory that they share.
//
// A sum has the order of the ranks: fp32 numbers, ((rank 0 + rank 1) + rank 2) + ..., rounded once at the end. So a number
// depends on no other number, on no size of a message, and is the same in every process.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace specdec {

class RankExchange {
 public:
  // `memory`: `bytes_for(num_ranks, chunk_bytes)` bytes, zero at first, which every process has mapped; it must outlive the
  // object. Every process must make the same calls in the same order.
  RankExchange(void* memory, std::int64_t chunk_bytes, int rank, int num_ranks, double timeout_seconds);

  static std::int64_t bytes_for(int num_ranks, std::int64_t chunk_bytes);

  // Writes the sums of `size` numbers of every rank; `out` may be `in`.
  void sum(DType dtype, const void* in, void* out, std::int64_t size);

  // Writes `num_rows` rows, each the rows of all ranks one after the other; `widths` are their lengths in bytes, by rank.
  void concatenate(const void* in, void* out, std::int64_t num_rows, const std::vector<std::int64_t>& widths);

  // Lets calls that wait for another process throw, in every process, until `restart`. Any thread may call it.
  void abort();

  // Forgets the calls so far, which may have been aborted. Every process must call it, rank 0 as the last one, and none
  // may exchange before that.
  void restart();

 private:
  struct alignas(64) Line {
    std::atomic<std::uint64_t> number;
  };

  Line& posted(int rank) const { return lines_[rank]; }
  Line& aborted() const { return lines_[num_ranks_]; }
  char* chunk(int rank) const { return chunks_ + (2 * rank + static_cast<int>(turn_ & 1)) * chunk_bytes_; }
  void post_and_wait();  // after it the chunks of all ranks may be read, until the next but one call
  void wait_for(int rank) const;

  Line* lines_;
  char* chunks_;
  std::int64_t chunk_bytes_;
  int rank_, num_ranks_;
  double timeout_seconds_;
  std::uint64_t turn_ = 0;  // of the chunks that are written next; two alternate
};

}  // namespace specdec
