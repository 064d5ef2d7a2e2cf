// What the drafting of chains and of trees have in common: how tokens are chosen from logits, and what rows take besides
// their tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/sampling.h"
#include "program/program.h"

namespace specdec {

// How tokens are chosen from logits.
struct Choice {
  DType dtype;               // of the logits
  std::int64_t width;        // logits per row
  std::int64_t vocab_size;   // ids that may be chosen, at most `width`
  const Sampling* sampling;  // null: greedy; its positions are those of the first forward
  // If the drafter has a vocabulary of its own, the target's id of each of its `vocab_size` ids: different ids below
  // `num_target_ids`. Noise belongs to the target's ids. Null: they are the same. A verification has none.
  const std::int64_t* target_ids = nullptr;
  std::int64_t num_target_ids = 0;
  // If the drafter's rows take ids of its own instead of the target's, its id of each of the target's, and the number of
  // the target's first ids that may be chosen. Null: rows take what was chosen, and every id of the drafter may be.
  const std::int64_t* drafter_ids = nullptr;
  std::int64_t num_choosable = 0;
};

// Throws std::invalid_argument if there are not so many logits as ids, and std::out_of_range if an id of the target is none.
void check(const Choice& choice);

// The rows that a program takes beside its tokens. The program's hidden states have the same size: those of a row are the
// input of the row after it.
struct CarriedRows {
  const char* first = nullptr;  // the inputs of the first forward's rows
  std::int64_t row_bytes = 0;   // 0: the program takes none
  // If not null, the inputs of the first forward's rows are the logits of this program, which has no KV entries and reads neither tokens
  // nor positions.
  Program* projection = nullptr;
  std::int64_t input_bytes = 0;                                // of a row that it takes, at least 1
  std::vector<std::pair<const char*, std::int64_t>> pieces{};  // address and number of such rows
};

// Throws std::invalid_argument if `num_rows` rows do not have these inputs.
void check(const CarriedRows& rows, std::int64_t num_rows);

// Logits over the target's vocabulary: those of the drafter's ids at the target's, all others -inf.
class WideLogits {
 public:
  WideLogits(const Choice& choice, std::size_t num_rows);

  const void* spread(const char* logits, std::size_t num_rows);

 private:
  Choice choice_;
  std::size_t item_;
  char nothing_[sizeof(float)];
  std::vector<char> numbers_;
};

// The inputs and the hidden states of a forward's rows; no memory if the program takes no inputs.
class Carried {
 public:
  Carried(const CarriedRows& rows, int num_threads);

  // Gives a forward its inputs, and memory for its hidden states.
  void set(Forward& forward);

  const char* input(std::size_t row) const { return inputs_ + row * bytes_; }
  const char* hidden(std::size_t row) const { return hidden_.data() + row * bytes_; }
  std::size_t row_bytes() const { return bytes_; }
  // The inputs of the next forward, row after row.
  void take(const std::vector<char>& inputs) { inputs_ = inputs.data(); }

 private:
  void project(const CarriedRows& rows, int num_threads);

  std::size_t bytes_;
  std::vector<char> hidden_, projected_;
  const char* inputs_;
};

}  // namespace specdec
