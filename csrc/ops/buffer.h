// Memory that a call of an op allocates while it runs.
#pragma once

#include <cstdint>
#include <memory>

namespace specdec {

// `size` bytes, aligned to the largest vector and a line of the cache. Their contents are arbitrary.
class Buffer {
 public:
  static constexpr std::int64_t kAlignment = 64;

  explicit Buffer(std::int64_t size) : bytes_(new char[static_cast<std::size_t>(size + kAlignment)]) {}
  char* get() const { return bytes_.get() + (-reinterpret_cast<std::intptr_t>(bytes_.get()) & (kAlignment - 1)); }

 private:
  std::unique_ptr<char[]> bytes_;
};

}  // namespace specdec
