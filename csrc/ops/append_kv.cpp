#include "ops/append_kv.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

void write_row(char* cache, const NewRows& rows, std::int64_t row, const AppendKVArgs& args) {
  const std::int64_t slot = args.slot_mapping[row];
  char* destination = cache + slot * args.num_kv_heads * rows.head_bytes;
  const char* source = rows.data + row * rows.stride_row;
  for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
    std::memcpy(destination + head * rows.head_bytes, source + head * rows.stride_head, rows.head_bytes);
  }
}

}  // namespace

void append_kv(const AppendKVArgs& args) {
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    if (args.slot_mapping[row] < 0 || args.slot_mapping[row] >= args.num_slots) {
      throw std::out_of_range("slot_mapping[" + std::to_string(row) + "] is " +
                              std::to_string(args.slot_mapping[row]) + "; the cache has " +
                              std::to_string(args.num_slots) + " slots");
    }
  }
  // Waking threads takes about as long as moving 64 KiB. Slots differ, except those of the scratch page, which nothing
  // reads.
  const std::int64_t row_bytes = args.num_kv_heads * (args.key.head_bytes + args.value.head_bytes);
  const bool worth_threads = args.num_rows * row_bytes > (1 << 16);
#pragma omp parallel for num_threads(args.num_threads) if (worth_threads) schedule(static)
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    write_row(args.key_cache, args.key, row, args);
    write_row(args.value_cache, args.value, row, args);
  }
}

}  // namespace specdec
