#include "ops/realign_kv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

void check(const RealignKVArgs& args) {
  for (std::int64_t row = 0; row < args.batch_size; ++row) {
    const std::int64_t start = args.starts[row], length = args.lengths[row], shift = args.shifts[row];
    if (length < 0 || start < 0 || start + shift < 0 || std::max(start, start + shift) + length > args.num_columns) {
      throw std::out_of_range("row " + std::to_string(row) + " cannot shift " + std::to_string(length) +
                              " columns from " + std::to_string(start) + " by " + std::to_string(shift) +
                              "; the cache has " + std::to_string(args.num_columns) + " columns");
    }
  }
}

// Moves the columns of one row and head.
void shift_columns(const RealignKVArgs& args, char* columns, std::int64_t row) {
  const std::int64_t length = args.lengths[row], shift = args.shifts[row];
  char* source = columns + args.starts[row] * args.stride_column;
  char* destination = source + shift * args.stride_column;
  if (args.stride_column == args.column_bytes) {  // one block; memmove allows the overlap
    std::memmove(destination, source, length * args.column_bytes);
    return;
  }
  for (std::int64_t i = 0; i < length; ++i) {
    const std::int64_t column = shift < 0 ? i : length - 1 - i;  // no column is written before it is read
    std::memcpy(destination + column * args.stride_column, source + column * args.stride_column, args.column_bytes);
  }
}

}  // namespace

void realign_kv(const RealignKVArgs& args) {
  check(args);
  std::int64_t bytes = 0;
  std::vector<std::int64_t> moving;  // rows
  for (std::int64_t row = 0; row < args.batch_size; ++row) {
    if (args.shifts[row] == 0 || args.lengths[row] == 0) continue;
    moving.push_back(row);
    bytes += args.lengths[row] * args.column_bytes * args.num_heads * static_cast<std::int64_t>(args.planes.size());
  }
  const std::int64_t per_plane = static_cast<std::int64_t>(moving.size()) * args.num_heads;
  const std::int64_t num_tasks = per_plane * static_cast<std::int64_t>(args.planes.size());
  // Waking threads takes about as long as moving 64 KiB.
#pragma omp parallel for num_threads(args.num_threads) if (bytes > (1 << 16)) schedule(dynamic, 8)
  for (std::int64_t task = 0; task < num_tasks; ++task) {
    const std::int64_t row = moving[task % per_plane / args.num_heads];
    const std::int64_t head = task % args.num_heads;
    char* plane = args.planes[task / per_plane];
    shift_columns(args, plane + row * args.stride_row + head * args.stride_head, row);
  }
}

}  // namespace specdec
