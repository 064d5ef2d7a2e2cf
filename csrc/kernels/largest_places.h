// The places of the largest of many numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace specdec {

// Returns the places of the `count` largest numbers, the largest first, of equal ones the first; NaNs are left out.
// `maximum(numbers, size)` returns the largest number. Most blocks have no number that is large enough; most of the time goes
// into `maximum`, which finds this out.
template <typename Number, typename Maximum>
std::vector<std::int64_t> largest_places(const Number* numbers, std::int64_t size, std::size_t count, Maximum maximum) {
  constexpr std::int64_t kBlock = 256;
  std::vector<std::int64_t> found;
  if (count == 0) return found;
  const auto is_larger = [numbers](std::int64_t one, std::int64_t other) { return numbers[one] > numbers[other]; };
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const std::int64_t stop = std::min(size, start + kBlock);
    if (found.size() == count && !(maximum(numbers + start, stop - start) > numbers[found.back()])) continue;
    for (std::int64_t place = start; place < stop; ++place) {
      if (numbers[place] != numbers[place] || (found.size() == count && !is_larger(place, found.back()))) continue;
      if (found.size() == count) found.pop_back();
      found.insert(std::upper_bound(found.begin(), found.end(), place, is_larger), place);
    }
  }
  return found;
}

}  // namespace specdec
