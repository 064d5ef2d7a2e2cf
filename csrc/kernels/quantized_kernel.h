// The arithmetic of quantized_linear, included once per instruction set (attention_kernel.h explains why). SPECDEC_ISA names
// the namespace, SPECDEC_LANES the number of floats in its vectors; SPECDEC_VNNI is defined where one instruction adds the
// products of four 8-bit integers.
//
// The lanes of a vector belong to outputs. Of a block, two sums add the products of even and of odd inputs, in order, as a
// tile instruction does (amx_tiles.h); then the scaled sum of both is added to the output's total, block after block. So no
// bit depends on how rows and panels are divided, nor on the thread.

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/vectors.h"

#include "kernels/quantized_codes.h"

constexpr int kPanelVectors = static_cast<int>(kPanelOutputs) / kLanes;
// Rows and panels of a tile, so that two sums for each output of each row stay in registers.
constexpr int kTileRows = SPECDEC_LANES == 16 ? 6 : SPECDEC_LANES == 8 ? 3 : 2;
constexpr int panels_of_rows(int rows) {
  return SPECDEC_LANES == 16 ? (rows <= 2 ? 4 : 2) : SPECDEC_LANES == 8 ? (rows == 1 ? 2 : 1) : 1;
}

// Blocks [first, last) of the task, whose scales have been converted.
struct Blocks {
  std::int64_t first, last;
};

// The numbers of Float16, without the product of subnormal numbers by which it makes them: a thread that has tiles' bits
// takes these for zeros (quantized_half_tiles.h), and a scale of small weights is subnormal in fp16.
struct HalfScale {
  using Storage = Float16::Storage;
  static inline float load(Storage half) {
    const std::uint32_t magnitude = (half & 0x7fffu) << 13;
    const float subnormal = bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
    const std::uint32_t finite = magnitude < (1u << 23) ? bit_cast<std::uint32_t>(subnormal) : magnitude + (112u << 23);
    const std::uint32_t special = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;  // infinity and NaN
    return bit_cast<float>(finite | special | (static_cast<std::uint32_t>(half & 0x8000u) << 16));
  }
};

template <typename Format>
SPECDEC_INLINE void convert_panel(const typename Format::Storage* from, float* to) {
  for (int i = 0; i < kPanelOutputs; ++i) to[i] = Format::load(from[i]);
}

#if SPECDEC_LANES == 16
template <>
SPECDEC_INLINE void convert_panel<HalfScale>(const HalfScale::Storage* from, float* to) {
  _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
#elif SPECDEC_LANES == 8
template <>
SPECDEC_INLINE void convert_panel<HalfScale>(const HalfScale::Storage* from, float* to) {
  for (int i = 0; i < kPanelOutputs; i += kLanes) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
}
#endif

// The group of block after block. A division for each block would take longer than the conversion of its scales.
class BlockGroup {
 public:
  BlockGroup(std::int64_t first_block, std::int64_t blocks_of_group)
      : number_(first_block / blocks_of_group), left_(blocks_of_group - first_block % blocks_of_group), blocks_(blocks_of_group) {}
  std::int64_t number() const { return number_; }
  void next_block() {
    if (--left_ > 0) return;
    ++number_;
    left_ = blocks_;
  }

 private:
  std::int64_t number_, left_, blocks_;
};

template <typename Format>
void convert(const void* from, std::int64_t groups, std::int64_t blocks_of_group, Blocks blocks, float* to) {
  const auto* numbers = static_cast<const typename Format::Storage*>(from);
  BlockGroup group(blocks.first, blocks_of_group);
  for (std::int64_t b = blocks.first; b < blocks.last; ++b, to += kPanelOutputs, group.next_block()) {
    convert_panel<Format>(numbers + std::min(groups - 1, group.number()) * kPanelOutputs, to);
  }
}

typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));

// Integers of groups times fp16 numbers of kSuperGroup inputs; these products are exact in fp32.
void convert_two_levels(const PackedWeight& weight, const void* from, const std::uint16_t* supers, Blocks blocks, float* to) {
  const std::int64_t last = weight.num_groups() - 1;
  const std::int64_t blocks_of_super = kSuperGroup / weight.block_size;
  BlockGroup group(blocks.first, weight.group_size / weight.block_size);
  float super[kPanelOutputs] = {};
  for (std::int64_t b = blocks.first; b < blocks.last; ++b, to += kPanelOutputs, group.next_block()) {
    if (b == blocks.first || b % blocks_of_super == 0) convert_panel<HalfScale>(supers + b / blocks_of_super * kPanelOutputs, super);
    const auto* numbers = static_cast<const std::int8_t*>(from) + std::min(last, group.number()) * kPanelOutputs;
    for (int i = 0; i < kPanelOutputs; i += kLanes) {
      store_as(to + i, __builtin_convertvector(load_as<Bytes>(numbers + i), Vector) * load_vector(super + i));
    }
  }
}

// The scales, and the minima after them, of the task's panels and some blocks in fp32.
void convert_scales(const QuantizedTask& task, Blocks blocks) {
  const PackedWeight& weight = *task.weight;
  const std::int64_t groups = weight.num_groups(), each = weight.group_size / weight.block_size;
  const auto convert_all = [&](const void* from, const std::uint16_t* supers, float* to) {
    for (std::int64_t p = task.first_panel; p < task.first_panel + task.num_panels; ++p, to += kScaleBlocks * kPanelOutputs) {
      const char* panel = static_cast<const char*>(from) + p * groups * kPanelOutputs * weight.scale_bytes();
      // Those of the next panels are fetched meanwhile, as their codes are.
      const char* next = panel + (task.num_panels * groups + blocks.first / each) * kPanelOutputs * weight.scale_bytes();
      const std::int64_t bytes = (blocks.last - blocks.first) / each * kPanelOutputs * weight.scale_bytes();
      for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
      if (supers != nullptr) {
        convert_two_levels(weight, panel, supers + p * weight.num_supers() * kPanelOutputs, blocks, to);
      } else if (weight.scale_dtype == DType::kFloat32) {
        convert<Float32>(panel, groups, each, blocks, to);
      } else if (weight.scale_dtype == DType::kFloat16) {
        convert<HalfScale>(panel, groups, each, blocks, to);
      } else {
        convert<BFloat16>(panel, groups, each, blocks, to);
      }
    }
  };
  convert_all(weight.scales, weight.super_scales, task.scales);
  if (weight.mins == nullptr) return;
  convert_all(weight.mins, weight.super_mins, task.scales + task.num_panels * kScaleBlocks * kPanelOutputs);
}

// The operands of one tile: kR rows times kP panels.
struct Tile {
  const std::uint32_t* codes;   // of the first panel's first block
  std::int64_t panel_words;     // from one panel's codes to the next one's
  std::int64_t words;           // of a block, for each output
  std::int64_t words_ahead;     // from codes to those that are fetched meanwhile: the same place of the next panels
  const float *scales, *mins;   // [panels, kScaleBlocks, kPanelOutputs]; mins may be null
  float* totals;                // of the first row and panel
  std::int64_t total_stride;    // from one row's totals to the next one's
  std::int64_t num_blocks;
  std::int64_t row_blocks;      // blocks of a row
};

// Adds scale * sum, and minimum * (sum of inputs), to the totals of one block.
template <int kR, int kP>
SPECDEC_INLINE void add_block(const Tile& tile, std::int64_t block, const Vector (&sums)[kR][kP * kPanelVectors],
                              const float* input_sums) {
  for (int p = 0; p < kP; ++p) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const std::int64_t at = (p * kScaleBlocks + block) * kPanelOutputs + v * kLanes;
      const Vector scale = load_vector(tile.scales + at);
      for (int r = 0; r < kR; ++r) {
        float* to = tile.totals + r * tile.total_stride + p * kPanelOutputs + v * kLanes;
        Vector total = multiply_add(scale, sums[r][p * kPanelVectors + v], load_vector(to));
        if (tile.mins != nullptr) total = multiply_add(load_vector(tile.mins + at), splat(input_sums[r * tile.row_blocks]), total);
        store_as(to, total);
      }
    }
  }
}

template <typename Codes, int kR, int kP, int... kInputs>
SPECDEC_INLINE void add_word(const Codes& codes, const Words (&words)[kP * kPanelVectors], const float* inputs,
                             std::int64_t stride, Vector (&sums)[2][kR][kP * kPanelVectors],
                             std::integer_sequence<int, kInputs...>) {
  const auto add = [&](auto i) {
    constexpr int kInput = decltype(i)::value;
    Vector values[kP * kPanelVectors];
    for (int p = 0; p < kP * kPanelVectors; ++p) values[p] = codes.template values<code_of<Codes>(kInput)>(words[p]);
    for (int r = 0; r < kR; ++r) {
      const Vector input = splat(inputs[r * stride + kInput]);
      for (int p = 0; p < kP * kPanelVectors; ++p) sums[kInput % 2][r][p] = multiply_add(input, values[p], sums[kInput % 2][r][p]);
    }
  };
  (add(std::integral_constant<int, kInputs>()), ...);
}

// `inputs` and `input_sums` are those of the first row and block.
template <typename Codes, int kR, int kP>
void multiply_tile(const Codes& codes, const Tile& tile, const float* inputs, std::int64_t stride, const float* input_sums) {
  const std::uint32_t* from = tile.codes;
  for (std::int64_t block = 0; block < tile.num_blocks; ++block) {
    Vector sums[2][kR][kP * kPanelVectors] = {};
    for (std::int64_t w = 0; w < tile.words; ++w, from += kPanelOutputs, inputs += Codes::kCodes) {
      Words words[kP * kPanelVectors];
      for (int p = 0; p < kP; ++p) {
        for (int v = 0; v < kPanelVectors; ++v) {
          words[p * kPanelVectors + v] = load_as<Words>(from + p * tile.panel_words + v * kLanes);
          if (v == 0) __builtin_prefetch(from + p * tile.panel_words + tile.words_ahead, 0, 2);
        }
      }
      add_word<Codes, kR, kP>(codes, words, inputs, stride, sums, std::make_integer_sequence<int, Codes::kCodes>());
    }
    for (int r = 0; r < kR; ++r) {
      for (int p = 0; p < kP * kPanelVectors; ++p) sums[0][r][p] += sums[1][r][p];
    }
    add_block<kR, kP>(tile, block, sums[0], input_sums + block);
  }
}

#include "kernels/quantized_whole.h"

// Calls `tile` for all tiles of a task: from a row of the task, rows, a panel of the task, panels, and the operands.
template <typename Run>
void run_tiles(const QuantizedTask& task, Run run) {
  const PackedWeight& weight = *task.weight;
  const std::int64_t num_blocks = weight.num_blocks(), block_words = weight.words() * kPanelOutputs;
  const float* mins = weight.mins == nullptr ? nullptr : task.scales + task.num_panels * kScaleBlocks * kPanelOutputs;
  std::memset(task.totals, 0, sizeof(float) * static_cast<std::size_t>(task.num_rows * task.num_panels * kPanelOutputs));
  for (std::int64_t first = 0; first < num_blocks; first += kScaleBlocks) {
    const Blocks blocks = {first, std::min(num_blocks, first + kScaleBlocks)};
    convert_scales(task, blocks);
    for (std::int64_t row = 0; row < task.num_rows;) {
      // About equal heights, because a last tile of one row would leave multipliers idle.
      const std::int64_t left = task.num_rows - row, tiles = (left + kTileRows - 1) / kTileRows;
      const int rows = static_cast<int>((left + tiles - 1) / tiles);
      for (std::int64_t panel = 0; panel < task.num_panels;) {
        const int panels = task.num_panels - panel >= panels_of_rows(rows) ? panels_of_rows(rows) : 1;
        const std::int64_t scale_at = panel * kScaleBlocks * kPanelOutputs;
        const std::int64_t words_ahead = row == 0 ? task.num_panels * num_blocks * block_words : 0;
        run(first, row, rows, panels,
            Tile{weight.codes + ((task.first_panel + panel) * num_blocks + first) * block_words, num_blocks * block_words,
                 weight.words(), words_ahead, task.scales + scale_at, mins == nullptr ? nullptr : mins + scale_at,
                 task.totals + (row * task.num_panels + panel) * kPanelOutputs, task.num_panels * kPanelOutputs,
                 blocks.last - blocks.first, num_blocks});
        panel += panels;
      }
      row += rows;
    }
  }
}

template <typename Codes, int... kBelow>
void multiply_with(const QuantizedTask& task, std::integer_sequence<int, kBelow...>) {
  using Multiply = void (*)(const Codes&, const Tile&, const float*, std::int64_t, const float*);
  static constexpr Multiply kMany[] = {multiply_tile<Codes, kBelow + 1, panels_of_rows(kBelow + 1)>...};
  static constexpr Multiply kSingle[] = {multiply_tile<Codes, kBelow + 1, 1>...};
  const Codes codes(*task.weight);
  const PreparedRows& rows = *task.rows;
  run_tiles(task, [&](std::int64_t block, std::int64_t row, int num_rows, int panels, const Tile& tile) {
    const std::int64_t at = task.first_row + row;
    (panels == 1 ? kSingle : kMany)[num_rows - 1](codes, tile, rows.numbers + at * rows.padded + block * task.weight->block_size,
                                                  rows.padded, rows.sums + at * tile.row_blocks + block);
  });
}

void multiply(const QuantizedTask& task) {
  constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
  if (task.weight->kind == CodeKind::kInt8) return multiply_with<Int8Codes>(task, kRows);
  if (task.weight->kind == CodeKind::kFloat8) return multiply_with<Float8Codes>(task, kRows);
  multiply_with<TableCodes>(task, kRows);
}

template <typename Codes, int... kBelow>
void multiply_whole_with(const QuantizedTask& task, std::integer_sequence<int, kBelow...>) {
  using Multiply = void (*)(const Codes&, const Tile&, const WholeInputs&);
  static constexpr Multiply kMany[] = {multiply_whole_tile<Codes, kBelow + 1, panels_of_rows(kBelow + 1)>...};
  static constexpr Multiply kSingle[] = {multiply_whole_tile<Codes, kBelow + 1, 1>...};
  const Codes codes(*task.weight);
  const PreparedRows& rows = *task.rows;
  run_tiles(task, [&](std::int64_t block, std::int64_t row, int num_rows, int panels, const Tile& tile) {
    const std::int64_t at = task.first_row + row, block_at = at * tile.row_blocks + block;
    (panels == 1 ? kSingle : kMany)[num_rows - 1](
        codes, tile, {rows.whole + at * rows.padded + block * task.weight->block_size, rows.padded, rows.steps + block_at,
                      rows.offsets + block_at, rows.sums + block_at});
  });
}

void multiply_whole(const QuantizedTask& task) {
  constexpr auto kRows = std::make_integer_sequence<int, kTileRows>();
  if (task.weight->kind == CodeKind::kInt8) return multiply_whole_with<WholeInt8>(task, kRows);
  multiply_whole_with<WholeTable>(task, kRows);
}

const QuantizedCode kCode = {multiply, nullptr, nullptr, nullptr, multiply_whole, offset_of, false};

#ifdef SPECDEC_VNNI
#include "kernels/quantized_chunks.h"

const QuantizedCode kChunkCode = {multiply, nullptr, nullptr, nullptr, multiply_chunks, offset_of, false, kPreparedRows};
#endif

#ifdef SPECDEC_TILES
#include "kernels/quantized_tiles.h"

#include "kernels/quantized_half_tiles.h"

#ifdef SPECDEC_INTEGER_TILES
#include "kernels/quantized_integer_tiles.h"

const QuantizedCode kTileCode = {multiply, takes_halves, multiply_halves, multiply_flushed, multiply_whole_on_tiles, offset_of, true};
#else
const QuantizedCode kTileCode = {multiply, takes_halves, multiply_halves, nullptr, multiply_whole, offset_of, false};
#endif
#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec
