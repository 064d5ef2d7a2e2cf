// Checks that keep a kernel inside its buffers, with their messages.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace specdec {

// Throws std::out_of_range unless every page that holds one of `sequence`'s first `num_entries` entries exists.
inline void check_pages(const std::int32_t* block_table, std::int64_t max_pages, std::int64_t page_size,
                        std::int64_t num_pages, std::int64_t sequence, std::int64_t num_entries) {
  for (std::int64_t page = 0; page * page_size < num_entries; ++page) {
    const std::int32_t id = block_table[sequence * max_pages + page];
    if (id < 0 || id >= num_pages) {
      throw std::out_of_range("block_table[" + std::to_string(sequence) + ", " + std::to_string(page) + "] is " +
                              std::to_string(id) + "; the cache has " + std::to_string(num_pages) + " pages");
    }
  }
}

}  // namespace specdec
