#include "program/rank_exchange.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels/conversions.h"

namespace specdec {

namespace {

constexpr int kSpins = 2000;          // before a waiting process offers its core to others
constexpr std::int64_t kBlock = 512;  // numbers that are added at a time, in the first-level cache

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

RankExchange::RankExchange(void* memory, std::int64_t chunk_bytes, int rank, int num_ranks, double timeout_seconds)
    : lines_(static_cast<Line*>(memory)),
      chunks_(static_cast<char*>(memory) + (num_ranks + 1) * static_cast<std::int64_t>(sizeof(Line))),
      chunk_bytes_(chunk_bytes),
      rank_(rank),
      num_ranks_(num_ranks),
      timeout_seconds_(timeout_seconds) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share these numbers");
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks || chunk_bytes < 64) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + ", chunks of " +
                                std::to_string(chunk_bytes) + " bytes");
  }
}

std::int64_t RankExchange::bytes_for(int num_ranks, std::int64_t chunk_bytes) {
  return (num_ranks + 1) * static_cast<std::int64_t>(sizeof(Line)) + 2 * num_ranks * chunk_bytes;
}

void RankExchange::abort() { aborted().number.store(1, std::memory_order_release); }

void RankExchange::restart() {
  turn_ = 0;
  posted(rank_).number.store(0, std::memory_order_release);
  if (rank_ == 0) aborted().number.store(0, std::memory_order_release);
}

void RankExchange::wait_for(int rank) const {
  const std::uint64_t wanted = turn_ + 1;
  for (int i = 0; i < kSpins; ++i) {
    if (posted(rank).number.load(std::memory_order_acquire) >= wanted) return;
    relax();
  }
  const auto started = std::chrono::steady_clock::now();
  while (posted(rank).number.load(std::memory_order_acquire) < wanted) {
    if (aborted().number.load(std::memory_order_acquire)) throw std::runtime_error("an exchange between ranks was aborted");
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (seconds > timeout_seconds_) {
      throw std::runtime_error("rank " + std::to_string(rank) + " has sent nothing for " + std::to_string(seconds) +
                               " seconds");
    }
    if (seconds < 0.05) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

void RankExchange::post_and_wait() {
  posted(rank_).number.store(turn_ + 1, std::memory_order_release);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) wait_for(rank);
  }
}

void RankExchange::sum(DType dtype, const void* in, void* out, std::int64_t size) {
  const std::int64_t item = item_size(dtype);
  const std::int64_t most = chunk_bytes_ / item;
  std::array<float, kBlock> total, other;
  for (std::int64_t first = 0; first < size; first += most) {
    const std::int64_t count = std::min(most, size - first);
    std::memcpy(chunk(rank_), static_cast<const char*>(in) + first * item, static_cast<std::size_t>(count * item));
    post_and_wait();
    for (std::int64_t i = 0; i < count; i += kBlock) {
      const std::int64_t block = std::min(kBlock, count - i);
      widen_all(dtype, chunk(0) + i * item, total.data(), block);
      for (int rank = 1; rank < num_ranks_; ++rank) {
        widen_all(dtype, chunk(rank) + i * item, other.data(), block);
        for (std::int64_t k = 0; k < block; ++k) total[static_cast<std::size_t>(k)] += other[static_cast<std::size_t>(k)];
      }
      narrow_all(dtype, total.data(), static_cast<char*>(out) + (first + i) * item, block);
    }
    ++turn_;
  }
}

void RankExchange::concatenate(const void* in, void* out, std::int64_t num_rows, const std::vector<std::int64_t>& widths) {
  if (static_cast<int>(widths.size()) != num_ranks_) throw std::invalid_argument("one width per rank is expected");
  std::int64_t total = 0, widest = 1;
  for (const std::int64_t width : widths) {
    total += width;
    widest = std::max(widest, width);
  }
  const std::int64_t own = widths[static_cast<std::size_t>(rank_)];
  const std::int64_t columns = std::min(widest, chunk_bytes_), rows = chunk_bytes_ / columns;
  const auto count_of = [&](std::int64_t width, std::int64_t first) {
    return static_cast<std::size_t>(std::max<std::int64_t>(0, std::min(columns, width - first)));
  };
  for (std::int64_t row = 0; row < num_rows; row += rows) {
    const std::int64_t block = std::min(rows, num_rows - row);
    for (std::int64_t column = 0; column < widest; column += columns) {
      for (std::int64_t i = 0; i < block; ++i) {
        const std::size_t count = count_of(own, column);
        if (count) std::memcpy(chunk(rank_) + i * columns, static_cast<const char*>(in) + (row + i) * own + column, count);
      }
      post_and_wait();
      std::int64_t first = 0;
      for (int rank = 0; rank < num_ranks_; ++rank) {
        const std::int64_t width = widths[static_cast<std::size_t>(rank)];
        const std::size_t count = count_of(width, column);
        for (std::int64_t i = 0; count && i < block; ++i) {
          std::memcpy(static_cast<char*>(out) + (row + i) * total + first + column, chunk(rank) + i * columns, count);
        }
        first += width;
      }
      ++turn_;
    }
  }
}

}  // namespace specdec
