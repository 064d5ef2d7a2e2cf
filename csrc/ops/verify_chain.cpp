#include "ops/verify_chain.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/multiversion.h"

namespace specdec {
namespace {

constexpr std::int64_t kInvalidToken = -1;
constexpr std::int64_t kBlock = 4096;  // logits per block: small enough to be rescanned from the first-level cache

// A float's bits as an integer of the same order. A compiler may reorder an integer maximum, so it vectorises it without
// -ffast-math, and one function serves fp32, fp16 and bf16. `kInfinity` is the bit pattern of +inf: a magnitude above it
// is a NaN.
template <typename Int, Int kInfinity>
struct Ordered {
  using Bits = Int;
  static constexpr Int kMagnitude = std::numeric_limits<Int>::max();
  static constexpr Int infinity = kInfinity;
  static inline Int magnitude(Int bits) { return static_cast<Int>(bits & kMagnitude); }
  static inline Int key(Int bits) {
    // The bits of negative floats are ordered backwards, so their magnitude is flipped. -0 must equal +0.
    const Int flipped = static_cast<Int>(bits ^ ((bits >> (8 * sizeof(Int) - 1)) & kMagnitude));
    return magnitude(bits) == 0 ? Int{0} : flipped;
  }
};
using OrderedFloat32 = Ordered<std::int32_t, 0x7f800000>;
using OrderedFloat16 = Ordered<std::int16_t, 0x7c00>;
using OrderedBFloat16 = Ordered<std::int16_t, 0x7f80>;

template <typename Format>
inline __attribute__((always_inline)) std::int64_t argmax(const typename Format::Bits* row, std::int64_t size) {
  using Bits = typename Format::Bits;
  Bits best = std::numeric_limits<Bits>::min();
  Bits largest_magnitude = 0;
  std::int64_t best_block = 0;
  for (std::int64_t start = 0; start < size; start += kBlock) {
    const std::int64_t stop = std::min(size, start + kBlock);
    Bits block_best = std::numeric_limits<Bits>::min();
    Bits block_magnitude = 0;
    for (std::int64_t i = start; i < stop; ++i) {
      block_best = std::max(block_best, Format::key(row[i]));
      block_magnitude = std::max(block_magnitude, Format::magnitude(row[i]));
    }
    largest_magnitude = std::max(largest_magnitude, block_magnitude);
    if (block_best > best) {  // strictly greater: of equal maxima, the first block wins
      best = block_best;
      best_block = start;
    }
  }
  if (largest_magnitude > Format::infinity) return kInvalidToken;
  std::int64_t i = best_block;
  while (Format::key(row[i]) != best) ++i;
  return i;
}

// For each byte, eight words of which all bits or none are set, as the byte's bits are.
template <typename Int>
constexpr std::array<std::array<Int, 8>, 256> selections() {
  std::array<std::array<Int, 8>, 256> found{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    for (std::size_t bit = 0; bit < 8; ++bit) found[byte][bit] = (byte >> bit & 1) != 0 ? Int{-1} : Int{0};
  }
  return found;
}

template <typename Int>
constexpr std::array<std::array<Int, 8>, 256> kSelections = selections<Int>();

// As `argmax`, of the tokens whose bits are set. No token wins by a logit of -inf.
template <typename Format>
inline __attribute__((always_inline)) std::int64_t masked_argmax(const typename Format::Bits* row, std::int64_t size,
                                                                 const std::int32_t* words) {
  using Bits = typename Format::Bits;
  constexpr Bits kNone = std::numeric_limits<Bits>::min();
  Bits best = Format::key(static_cast<Bits>(kNone | Format::infinity));
  Bits largest_magnitude = 0;
  std::int64_t winner = kInvalidToken;
  for (std::int64_t start = 0; start < size; start += 32) {
    const auto word = static_cast<std::uint32_t>(words[start / 32]);
    const std::int64_t count = std::min<std::int64_t>(32, size - start);
    Bits keys[32], selected[32];
    Bits magnitude = 0, block_best = kNone;
    for (int byte = 0; byte < 4; ++byte) {
      const auto& own = kSelections<Bits>[word >> (8 * byte) & 0xff];
      std::copy(own.begin(), own.end(), selected + 8 * byte);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      magnitude = std::max(magnitude, Format::magnitude(row[start + i]));
      keys[i] = static_cast<Bits>((Format::key(row[start + i]) & selected[i]) | (kNone & ~selected[i]));
      block_best = std::max(block_best, keys[i]);
    }
    largest_magnitude = std::max(largest_magnitude, magnitude);
    if (block_best <= best) continue;  // of equal maxima, the first one wins
    best = block_best;
    winner = start + (std::find(keys, keys + count, best) - keys);
  }
  return largest_magnitude > Format::infinity ? kInvalidToken : winner;
}

SPECDEC_MULTIVERSION
std::int64_t masked_argmax_float32(const std::int32_t* row, std::int64_t size, const std::int32_t* words) {
  return masked_argmax<OrderedFloat32>(row, size, words);
}

SPECDEC_MULTIVERSION
std::int64_t masked_argmax_float16(const std::int16_t* row, std::int64_t size, const std::int32_t* words) {
  return masked_argmax<OrderedFloat16>(row, size, words);
}

SPECDEC_MULTIVERSION
std::int64_t masked_argmax_bfloat16(const std::int16_t* row, std::int64_t size, const std::int32_t* words) {
  return masked_argmax<OrderedBFloat16>(row, size, words);
}

SPECDEC_MULTIVERSION
std::int64_t argmax_float32(const std::int32_t* row, std::int64_t size) {
  return argmax<OrderedFloat32>(row, size);
}

SPECDEC_MULTIVERSION
std::int64_t argmax_float16(const std::int16_t* row, std::int64_t size) {
  return argmax<OrderedFloat16>(row, size);
}

SPECDEC_MULTIVERSION
std::int64_t argmax_bfloat16(const std::int16_t* row, std::int64_t size) {
  return argmax<OrderedBFloat16>(row, size);
}

std::int64_t argmax_row(const VerifyChainArgs& args, std::int64_t row) {
  const std::int64_t offset = row * args.row_stride;
  switch (args.dtype) {
    case DType::kFloat32:
      return argmax_float32(static_cast<const std::int32_t*>(args.logits) + offset, args.vocab_size);
    case DType::kFloat16:
      return argmax_float16(static_cast<const std::int16_t*>(args.logits) + offset, args.vocab_size);
    case DType::kBFloat16:
      return argmax_bfloat16(static_cast<const std::int16_t*>(args.logits) + offset, args.vocab_size);
  }
  return kInvalidToken;
}

std::int64_t masked_argmax_row(const VerifyChainArgs& args, std::int64_t row, const std::int32_t* words) {
  const std::int64_t offset = row * args.row_stride;
  switch (args.dtype) {
    case DType::kFloat32:
      return masked_argmax_float32(static_cast<const std::int32_t*>(args.logits) + offset, args.vocab_size, words);
    case DType::kFloat16:
      return masked_argmax_float16(static_cast<const std::int16_t*>(args.logits) + offset, args.vocab_size, words);
    case DType::kBFloat16:
      return masked_argmax_bfloat16(static_cast<const std::int16_t*>(args.logits) + offset, args.vocab_size, words);
  }
  return kInvalidToken;
}

// The tokens of the rows from a sequence's first to one of its rows.
struct Path {
  const std::int64_t* token_ids;
  std::int64_t length;
};

// `scratch` holds the path if it is not a part of the rows as they lie.
Path path_to(const VerifyChainArgs& args, std::int64_t first, std::int64_t row, std::vector<std::int64_t>& scratch) {
  if (args.parents == nullptr) return {args.token_ids + first, row - first + 1};
  scratch.clear();
  for (; row > first; row = first + args.parents[row]) scratch.push_back(args.token_ids[row]);
  scratch.push_back(args.token_ids[first]);
  std::swap(scratch.front(), scratch.back());  // the first row's token first; penalties need no other order
  return {scratch.data(), static_cast<std::int64_t>(scratch.size())};
}

// The bitmask of a row; null if it forbids nothing.
const std::int32_t* mask_of(const VerifyChainArgs& args, std::int64_t row) {
  const std::int32_t* allowed = args.sampling->allowed;
  if (allowed == nullptr) return nullptr;
  const std::int64_t num_words = (args.vocab_size + 31) / 32;
  const std::int32_t* words = allowed + row * num_words;
  const bool is_free = std::all_of(words, words + num_words, [](std::int32_t word) { return word == -1; });
  return is_free ? nullptr : words;
}

// What changes the logits of a row of sequence `b`, but for the tokens that its penalties count.
Edits edits_of(const VerifyChainArgs& args, std::int64_t row, std::int64_t b) {
  const Sampling& s = *args.sampling;
  Edits edits;
  edits.repetition_penalty = s.repetition_penalties[b];
  edits.allowed = mask_of(args, row);
  if (s.presence_penalties == nullptr) return edits;
  edits.presence_penalty = s.presence_penalties[b];
  edits.frequency_penalty = s.frequency_penalties[b];
  edits.bias_ids = s.bias_ids + s.cu_bias[b];
  edits.bias_values = s.bias_values + s.cu_bias[b];
  edits.num_biases = s.cu_bias[b + 1] - s.cu_bias[b];
  return edits;
}

// Memory that successive rows share.
struct Scratch {
  SampleScratch sampled;
  std::vector<std::int64_t> path;
};

std::int64_t choose(const VerifyChainArgs& args, std::int64_t row, Scratch& scratch) {
  if (args.sampling == nullptr) return argmax_row(args, row);
  const Sampling& s = *args.sampling;
  const std::int32_t* after = std::upper_bound(args.cu_seqlens, args.cu_seqlens + args.batch_size + 1, row);
  const std::int64_t b = after - args.cu_seqlens - 1;
  Edits edits = edits_of(args, row, b);
  if (s.temperatures[b] == 0.0 && !edits.penalise() && edits.num_biases == 0) {
    return edits.allowed == nullptr ? argmax_row(args, row) : masked_argmax_row(args, row, edits.allowed);
  }
  const Path path = path_to(args, args.cu_seqlens[b], row, scratch.path);
  edits.seen = {s.seen_ids + s.cu_seen[b], s.cu_seen[b + 1] - s.cu_seen[b],
                s.num_prompt == nullptr ? 0 : s.num_prompt[b], path.token_ids, path.length};
  const std::int64_t item = args.dtype == DType::kFloat32 ? 4 : 2;
  return sample_row({static_cast<const char*>(args.logits) + row * args.row_stride * item, args.dtype, args.vocab_size,
                     s.temperatures[b], s.top_k[b], s.top_p[b], s.min_p[b], s.seeds[b], s.positions[b] + path.length - 1,
                     edits},
                    scratch.sampled);
}

// Parents precede their children, so one pass finds the path.
void accept_tree(const VerifyChainArgs& args, const VerifyChainResult& result, std::int64_t sequence) {
  const std::int64_t start = args.cu_seqlens[sequence], stop = args.cu_seqlens[sequence + 1];
  std::int64_t row = start;
  std::int32_t* end = result.accepted_rows + start;
  for (std::int64_t child = start + 1; child < stop; ++child) {
    if (start + args.parents[child] != row || args.token_ids[child] != result.target_tokens[row]) continue;
    *end++ = static_cast<std::int32_t>(child - start);
    row = child;
  }
  result.num_accepted[sequence] = static_cast<std::int32_t>(end - (result.accepted_rows + start));
  result.next_tokens[sequence] = result.target_tokens[row];
  std::fill(end, result.accepted_rows + stop, -1);
}

void accept(const VerifyChainArgs& args, const VerifyChainResult& result, std::int64_t sequence) {
  if (args.parents != nullptr) return accept_tree(args, result, sequence);
  const std::int64_t start = args.cu_seqlens[sequence];
  const std::int64_t last = args.cu_seqlens[sequence + 1] - 1;
  std::int64_t row = start;
  while (row < last && args.token_ids[row + 1] == result.target_tokens[row]) ++row;
  result.num_accepted[sequence] = static_cast<std::int32_t>(row - start);
  result.next_tokens[sequence] = result.target_tokens[row];
}

}  // namespace

void verify_chain(const VerifyChainArgs& args, const VerifyChainResult& result) {
  // Waking a thread takes some microseconds, in which a core reads about 64K logits.
  const bool worth_threads = args.num_rows > 1 && args.num_rows * args.vocab_size > (1 << 16);
#pragma omp parallel num_threads(args.num_threads) if (worth_threads)
  {
    Scratch scratch;
    // Dynamic, because a sampled row takes many times as long as a greedy one.
#pragma omp for schedule(dynamic)
    for (std::int64_t row = 0; row < args.num_rows; ++row) result.target_tokens[row] = choose(args, row, scratch);
  }
  for (std::int64_t sequence = 0; sequence < args.batch_size; ++sequence) accept(args, result, sequence);
}

}  // namespace specdec
