#include "program/draft_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "kernels/conversions.h"

namespace specdec {

void check(const Choice& choice) {
  if (choice.vocab_size < 1 || choice.vocab_size > choice.width) {
    throw std::invalid_argument("tokens are chosen from " + std::to_string(choice.vocab_size) + " ids, but a row has " +
                                std::to_string(choice.width) + " logits");
  }
  for (std::int64_t id = 0; choice.target_ids != nullptr && id < choice.vocab_size; ++id) {
    if (choice.target_ids[id] >= 0 && choice.target_ids[id] < choice.num_target_ids) continue;
    throw std::out_of_range("draft id " + std::to_string(id) + " stands for " + std::to_string(choice.target_ids[id]) +
                            "; the target has " + std::to_string(choice.num_target_ids) + " ids");
  }
  if (choice.drafter_ids == nullptr) return;
  if (choice.target_ids == nullptr || choice.num_choosable < 1 || choice.num_choosable > choice.num_target_ids) {
    throw std::invalid_argument("of " + std::to_string(choice.num_target_ids) + " ids of a target, " +
                                std::to_string(choice.num_choosable) + " may be chosen");
  }
  for (std::int64_t id = 0; id < choice.num_choosable; ++id) {
    if (choice.drafter_ids[id] >= 0 && choice.drafter_ids[id] < choice.width) continue;
    throw std::out_of_range("id " + std::to_string(id) + " of the target stands for " +
                            std::to_string(choice.drafter_ids[id]) + "; the drafter has " + std::to_string(choice.width) +
                            " ids");
  }
}

void check(const CarriedRows& rows, std::int64_t num_rows) {
  if (rows.projection == nullptr) return;
  if (rows.input_bytes < 1) {
    throw std::invalid_argument("a projection takes rows of " + std::to_string(rows.input_bytes) +
                                " bytes; expected at least 1");
  }
  std::int64_t num_carried = 0;
  for (const auto& piece : rows.pieces) num_carried += piece.second;
  if (num_carried != num_rows) {
    throw std::invalid_argument("a projection has inputs for " + std::to_string(num_carried) + " rows, of a draft of " +
                                std::to_string(num_rows) + " rows");
  }
}

WideLogits::WideLogits(const Choice& choice, std::size_t num_rows)
    : choice_(choice), item_(static_cast<std::size_t>(item_size(choice.dtype))) {
  const float least = -std::numeric_limits<float>::infinity();
  narrow_all(choice.dtype, &least, nothing_, 1);
  numbers_.resize(num_rows * static_cast<std::size_t>(choice.num_target_ids) * item_);
  for (std::size_t i = 0; i < numbers_.size(); i += item_) std::memcpy(numbers_.data() + i, nothing_, item_);
}

// Every call writes the same places of a row, so the others stay as they are.
const void* WideLogits::spread(const char* logits, std::size_t num_rows) {
  for (std::size_t row = 0; row < num_rows; ++row) {
    char* to = numbers_.data() + row * static_cast<std::size_t>(choice_.num_target_ids) * item_;
    const char* from = logits + row * static_cast<std::size_t>(choice_.width) * item_;
    for (std::int64_t id = 0; id < choice_.vocab_size; ++id) {
      std::memcpy(to + static_cast<std::size_t>(choice_.target_ids[id]) * item_, from + static_cast<std::size_t>(id) * item_,
                  item_);
    }
  }
  return numbers_.data();
}

Carried::Carried(const CarriedRows& rows, int num_threads)
    : bytes_(static_cast<std::size_t>(rows.row_bytes)), inputs_(rows.first) {
  if (rows.projection != nullptr) project(rows, num_threads);
}

void Carried::set(Forward& forward) {
  if (bytes_ == 0) return;
  hidden_.resize(std::max(hidden_.size(), static_cast<std::size_t>(forward.num_rows) * bytes_));
  forward.inputs = inputs_;
  forward.hidden_states = hidden_.data();
}

void Carried::project(const CarriedRows& rows, int num_threads) {
  std::vector<char> taken;
  for (const auto& [piece, count] : rows.pieces) taken.insert(taken.end(), piece, piece + count * rows.input_bytes);
  std::vector<std::int64_t> all(taken.size() / static_cast<std::size_t>(rows.input_bytes));
  std::iota(all.begin(), all.end(), 0);
  projected_.resize(all.size() * bytes_);
  Forward forward{};
  forward.num_rows = forward.num_logit_rows = static_cast<std::int64_t>(all.size());
  forward.token_ids = forward.positions = forward.logit_rows = all.data();  // it reads `logit_rows` alone
  forward.logits = projected_.data();
  forward.num_threads = num_threads;
  forward.inputs = taken.data();
  rows.projection->run(forward);
  inputs_ = projected_.data();
}

}  // namespace specdec
