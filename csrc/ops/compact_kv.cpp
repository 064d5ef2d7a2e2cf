#include "ops/compact_kv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ops/bounds.h"

namespace specdec {
namespace {

void check(const CompactKVArgs& args) {
  const std::int64_t room = args.max_pages * args.page_size;
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int32_t first = args.cu_moves[b], stop = args.cu_moves[b + 1];
    if (first == stop) continue;
    // Positions rise, so the first and the last ones bound all others.
    const std::int64_t lowest = std::min(args.sources[first], args.destinations[first]);
    const std::int64_t highest = std::max(args.sources[stop - 1], args.destinations[stop - 1]);
    if (lowest < 0 || highest >= room) {
      throw std::out_of_range("sequence " + std::to_string(b) + " moves entries from " + std::to_string(lowest) +
                              " to " + std::to_string(highest) + "; its block table has room for " +
                              std::to_string(room));
    }
    check_pages(args.block_table, args.max_pages, args.page_size, args.num_pages, b, highest + 1);
  }
}

// Makes all moves of one sequence in one plane.
void move_entries(const CompactKVArgs& args, std::int64_t sequence, std::int64_t plane) {
  char* entries = args.kv_cache + plane * args.num_pages * args.page_size * args.entry_bytes;
  const std::int32_t* pages = args.block_table + sequence * args.max_pages;
  const auto entry = [&](std::int64_t position) {
    const std::int64_t slot = pages[position / args.page_size] * args.page_size + position % args.page_size;
    return entries + slot * args.entry_bytes;
  };
  const auto move = [&](std::int64_t m) {
    std::memcpy(entry(args.destinations[m]), entry(args.sources[m]), args.entry_bytes);
  };
  const std::int64_t first = args.cu_moves[sequence], stop = args.cu_moves[sequence + 1];
  for (std::int64_t m = first; m < stop; ++m) {
    if (args.destinations[m] < args.sources[m]) move(m);
  }
  for (std::int64_t m = stop - 1; m >= first; --m) {
    if (args.destinations[m] > args.sources[m]) move(m);
  }
}

}  // namespace

void compact_kv(const CompactKVArgs& args) {
  check(args);
  const std::int64_t num_moves = args.batch_size > 0 ? args.cu_moves[args.batch_size] : 0;
  const std::int64_t num_tasks = args.batch_size * args.num_planes;
  // Waking threads takes about as long as moving 64 KiB.
  const bool worth_threads = num_moves * args.num_planes * args.entry_bytes > (1 << 16);
#pragma omp parallel for num_threads(args.num_threads) if (worth_threads) schedule(dynamic)
  for (std::int64_t task = 0; task < num_tasks; ++task) {
    move_entries(args, task % args.batch_size, task / args.batch_size);
  }
}

}  // namespace specdec
