#include "ops/recurrent_rows.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/versions.h"
#include "ops/recurrent_driver.h"

namespace specdec {
namespace {

std::vector<Versions<const RecurrentKernel*>::Version> usable() {
  std::vector<Versions<const RecurrentKernel*>::Version> usable = {{"portable", &recurrent_portable::kKernel}};
#ifdef SPECDEC_X86_64_LEVELS
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", &recurrent_x86_64_v3::kKernel});
  if (__builtin_cpu_supports("x86-64-v4")) usable.push_back({"x86-64-v4", &recurrent_x86_64_v4::kKernel});
#endif
  return usable;
}

Versions<const RecurrentKernel*> versions("recurrent layers", usable());

}  // namespace

const RecurrentKernel& recurrent_kernel() { return *versions.chosen(); }

std::vector<std::string> recurrent_versions() { return versions.names(); }

void choose_recurrent_version(const std::string& name) { versions.choose(name); }

std::int64_t total_rows(const RecurrentRows& rows) {
  std::int64_t total = 0;
  for (std::int64_t b = 0; b < rows.batch_size; ++b) total += sequence_rows(rows, b).count;
  return total;
}

void check_recurrent_rows(const RecurrentRows& rows, std::int64_t num_slots, std::int64_t num_kept) {
  for (std::int64_t b = 0; b < rows.batch_size; ++b) {
    const SequenceRows own = sequence_rows(rows, b);
    const std::int64_t num_own = own.count - own.num_replayed;
    const std::string sequence = "sequence " + std::to_string(b);
    if (own.slot < 0 || own.slot >= num_slots) {
      throw std::out_of_range(sequence + " has slot " + std::to_string(own.slot) + "; there are " +
                              std::to_string(num_slots) + " slots");
    }
    if (own.first < 0 || num_own < 0 || own.first + num_own > rows.num_rows) {
      throw std::out_of_range(sequence + " has rows " + std::to_string(own.first) + " to " +
                              std::to_string(own.first + num_own) + "; there are " + std::to_string(rows.num_rows) +
                              " rows");
    }
    if (own.position < 0 || own.num_replayed < 0 || own.num_stored < 0 || own.num_stored > own.count) {
      throw std::out_of_range(sequence + " has a state of length " + std::to_string(own.position) + ", replays " +
                              std::to_string(own.num_replayed) + " rows and stores " + std::to_string(own.num_stored) +
                              " of " + std::to_string(own.count) + " rows");
    }
    const std::int64_t needed = own.num_replayed + (own.count > own.num_stored ? num_own : 0);
    if (num_kept >= 0 && needed > num_kept) {
      throw std::out_of_range(sequence + " needs " + std::to_string(needed) + " places for kept rows; there are " +
                              std::to_string(num_kept));
    }
  }
}

}  // namespace specdec
