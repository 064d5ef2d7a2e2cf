// Huge pages for weights. A forward of few rows is limited by how fast memory is read, and with pages of 4 KiB a processor
// also reads an entry of the page table for every page and fetches nothing beyond a page in advance.
#pragma once

#include <cstdint>

namespace specdec {

// Asks Linux to move the memory of [begin, begin + bytes) to huge pages, in place: its addresses and contents stay. Linux
// does so for memory of the process's own. Weights that are mapped from a file stay as they are, as does everything where
// the administrator set huge pages to "never", on older kernels, and on other systems.
void use_huge_pages(const void* begin, std::int64_t bytes);

}  // namespace specdec
