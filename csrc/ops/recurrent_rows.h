// The rows of one forward for recurrent layers, and the state slots that they start from.
// specdec_fast/batch/recurrent_batch.py says what the arrays mean.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace specdec {

struct RecurrentRows {
  std::int64_t num_rows;
  std::int64_t batch_size;
  const std::int32_t* cu_seqlens;     // [batch_size + 1]
  const std::int32_t* slots;          // [batch_size]
  const std::int32_t* state_lengths;  // [batch_size]
  const std::int32_t* num_replayed;   // [batch_size]
  const std::int32_t* num_stored;     // [batch_size]
};

// The rows of one sequence, in the order in which they advance its state: kept ones, then its own.
struct SequenceRows {
  std::int64_t slot;
  std::int64_t position;      // of the first of them; 0: the state is zero
  std::int64_t num_replayed;
  std::int64_t num_stored;    // how many of all advance the stored state
  std::int64_t count;         // all of them
  std::int64_t first;         // row of the forward that follows the kept ones
};

inline SequenceRows sequence_rows(const RecurrentRows& rows, std::int64_t b) {
  const std::int64_t first = rows.cu_seqlens[b], replayed = rows.num_replayed[b];
  return {rows.slots[b], rows.state_lengths[b], replayed, rows.num_stored[b],
          replayed + rows.cu_seqlens[b + 1] - first, first};
}

// The rows of all sequences, kept ones included.
std::int64_t total_rows(const RecurrentRows& rows);

// Throws std::out_of_range unless every slot, row and count lies inside its array. `num_kept`: places for kept rows of a
// slot, or -1 if the op keeps none.
void check_recurrent_rows(const RecurrentRows& rows, std::int64_t num_slots, std::int64_t num_kept);

// The instruction sets that this machine can run, the best last. The best is chosen; tests choose others.
std::vector<std::string> recurrent_versions();
void choose_recurrent_version(const std::string& name);

}  // namespace specdec
