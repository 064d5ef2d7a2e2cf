#include "ops/quantized_linear.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/amx_tiles.h"
#include "kernels/conversions.h"
#include "kernels/multiversion.h"
#include "kernels/quantized_work.h"
#include "kernels/versions.h"
#include "ops/buffer.h"

namespace specdec {
namespace {

std::vector<Versions<QuantizedVersion>::Version> usable() {
  const QuantizedCode* portable = &quantized_portable::kCode;
  std::vector<Versions<QuantizedVersion>::Version> usable = {
      {"amx-portable", {&quantized_portable::kTileCode, portable, portable}}, {"portable", {portable, portable, portable}}};
#ifdef SPECDEC_X86_64_LEVELS
  const QuantizedCode *v3 = &quantized_x86_64_v3::kCode, *v4 = &quantized_x86_64_v4::kCode;
  const QuantizedCode *vnni = &quantized_avx512_vnni::kCode, *amx = &quantized_amx::kTileCode;
  // Measured: from so many rows on, tiles are faster; later where a look-up does not make the operands of tiles.
  constexpr std::int64_t kHalfRows = 6, kTableRows = 3, kWholeRows = 7;
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", {v3, v3, v3}});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", {v4, v3, v3}});  // without VNNI, 512 bits lack an instruction that 256 bits have
    if (__builtin_cpu_supports("avx512vnni")) {
      usable.push_back({"avx512-vnni", {v4, vnni, vnni}});
      if (__builtin_cpu_supports("amx-int8") && permitted_amx()) usable.push_back({"amx", {amx, vnni, amx, kHalfRows, kTableRows, kWholeRows}});
    }
  }
#endif
  return usable;
}

Versions<QuantizedVersion> versions("quantized_linear", usable());

constexpr float kLeastRounded = 0x1p-100f;  // LEAST_ROUNDED in specdec_fast/ops/quantized_linear.py

// `size` elements in memory of their own; none if it is 0.
template <typename Element>
class Array {
 public:
  explicit Array(std::int64_t size) : buffer_(size * static_cast<std::int64_t>(sizeof(Element))) {}
  Element* data() const { return reinterpret_cast<Element*>(buffer_.get()); }

 private:
  Buffer buffer_;
};

// The memory of prepared rows.
struct RowMemory {
  RowMemory(std::int64_t rows, const PackedWeight& weight, bool stays_half)
      : halves(stays_half ? rows * weight.padded() : 0),
        numbers(weight.rounds_rows || stays_half ? 0 : rows * weight.padded()),
        whole(weight.rounds_rows ? rows * weight.padded() : 0),
        steps(weight.rounds_rows ? rows * weight.num_blocks() : 0),
        sums(rows * weight.num_blocks()),
        offsets(weight.rounds_rows ? rows * weight.num_blocks() : 0) {}

  Array<std::uint16_t> halves;
  Array<float> numbers;
  Array<std::int8_t> whole;
  Array<float> steps, sums;
  Array<std::int32_t> offsets;
};

// Rounds a block to whole numbers, and returns what one of them stands for: NaN if a number is not finite. Overwrites the
// numbers.
SPECDEC_MULTIVERSION
float round_block(float* __restrict numbers, std::int64_t size, std::int8_t* __restrict whole, std::int32_t* __restrict sum) {
  constexpr std::int32_t kInfinity = 0x7f800000;
  constexpr float kWhole = 0x1.8p23f;  // adding it rounds to a whole number, half to even
  std::int32_t bits = 0;  // those of the largest magnitude, which compare as magnitudes do
  for (std::int64_t i = 0; i < size; ++i) bits = std::max(bits, bit_cast<std::int32_t>(numbers[i]) & 0x7fffffff);
  const float largest = bit_cast<float>(bits);
  const bool is_finite = bits < kInfinity;
  *sum = 0;
  if (!is_finite || largest < kLeastRounded) {
    std::memset(whole, 0, static_cast<std::size_t>(size));
    return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = 127.0f / largest;
  // Two loops: in one, the compiler would fuse product and sum, and round once where the contract rounds twice.
  for (std::int64_t i = 0; i < size; ++i) numbers[i] *= inverse;
  std::int32_t total = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int32_t rounded = bit_cast<std::int32_t>(numbers[i] + kWhole) - bit_cast<std::int32_t>(kWhole);
    whole[i] = static_cast<std::int8_t>(rounded);
    total += rounded;
  }
  *sum = total;
  return largest / 127.0f;
}

// The rows of a call, prepared for its kernel, up to kPreparedRows at a time.
class Rows {
 public:
  // `stays_half`: whether rows of bf16 are multiplied as they are.
  Rows(const QuantizedLinearArgs& args, const QuantizedCode& code, bool stays_half)
      : args_(args),
        by_tile_(stays_half || (args.weight.rounds_rows && code.whole_tiles)),
        stays_half_(stays_half),
        offset_(args.weight.rounds_rows ? code.offset_of(args.weight) : 0),
        memory_(by_tile_ ? most_rows(args.num_rows) : std::min(args.num_rows, kPreparedRows), args.weight, stays_half) {}

  // Rows for which there is memory where tiles read them: 16 at a time, whatever their number.
  static std::int64_t most_rows(std::int64_t num_rows) {
    return (std::min(num_rows, kPreparedRows) + kTileHeight - 1) / kTileHeight * kTileHeight;
  }

  // Prepares row `row` of the call as row `to`.
  void prepare(std::int64_t row, std::int64_t to) {
    const PackedWeight& weight = args_.weight;
    const auto* from = static_cast<const char*>(args_.rows) + row * args_.row_stride * item_size(args_.dtype);
    const std::int64_t blocks = weight.num_blocks(), size = weight.block_size;
    if (stays_half_) copy_halves(from, to);
    if (stays_half_ && weight.mins == nullptr) return;
    const bool is_kept = !weight.rounds_rows && !stays_half_;
    const Array<float> own(is_kept ? 0 : weight.padded());
    float* numbers = is_kept ? memory_.numbers.data() + to * weight.padded() : own.data();
    widen_all(args_.dtype, from, numbers, weight.in_features);
    std::fill(numbers + weight.in_features, numbers + weight.padded(), 0.0f);
    if (!weight.rounds_rows) {
      for (std::int64_t block = 0; weight.mins != nullptr && block < blocks; ++block) {
        memory_.sums.data()[place(to, block)] = std::accumulate(numbers + block * size, numbers + (block + 1) * size, 0.0f);
      }
      return;
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t at = place(to, block);
      std::int32_t sum;
      const float step = round_block(numbers + block * size, size, memory_.whole.data() + at * size, &sum);
      memory_.steps.data()[at] = step;
      memory_.sums.data()[at] = step * static_cast<float>(sum);
      memory_.offsets.data()[at] = -offset_ * sum;
    }
  }

  PreparedRows prepared(std::int64_t num_rows) const {
    return {num_rows, args_.weight.padded(), memory_.numbers.data(), memory_.halves.data(), memory_.whole.data(),
            memory_.steps.data(), memory_.offsets.data(), memory_.sums.data()};
  }

  // Rows that are multiplied with a part of the weights while it stays in a cache.
  std::int64_t pass_rows() const { return by_tile_ ? kPreparedRows : kPassRows; }

 private:
  // Of the blocks of all rows, the place of a row's block.
  std::int64_t place(std::int64_t row, std::int64_t block) const {
    const std::int64_t blocks = args_.weight.num_blocks();
    if (!by_tile_) return row * blocks + block;
    return (row / kTileHeight * blocks + block) * kTileHeight + row % kTileHeight;
  }

  void copy_halves(const char* from, std::int64_t to) {
    const std::int64_t size = args_.weight.block_size, in_features = args_.weight.in_features;
    for (std::int64_t block = 0; block * size < in_features; ++block) {
      std::uint16_t* halves = memory_.halves.data() + place(to, block) * size;
      const std::int64_t count = std::min(size, in_features - block * size);
      std::memcpy(halves, from + block * size * 2, static_cast<std::size_t>(count) * 2);
      std::fill(halves + count, halves + size, std::uint16_t{0});
    }
  }

  const QuantizedLinearArgs& args_;
  bool by_tile_, stays_half_;
  int offset_;
  RowMemory memory_;
};

constexpr std::int64_t kTotals = kPreparedRows * kMostPanels * kPanelOutputs;
constexpr std::int64_t kScales = 2 * kMostPanels * kScaleBlocks * kPanelOutputs;

// Tiles and vectors make NaNs of other bits, and zeros of other signs: a bias of 0 makes every zero positive.
SPECDEC_MULTIVERSION
void add_bias(float* __restrict totals, const float* __restrict bias, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float total = totals[i] + bias[i];
    totals[i] = total == total ? total : std::numeric_limits<float>::quiet_NaN();
  }
}

// Computes the outputs of some panels for the prepared rows, which begin at row `first` of the call.
void compute_panels(const QuantizedLinearArgs& args, const PreparedRows& rows, std::int64_t first, std::int64_t first_panel,
                    std::int64_t num_panels, std::int64_t pass_rows, void (*multiply)(const QuantizedTask&), float* memory) {
  const PackedWeight& weight = args.weight;
  const std::int64_t output = first_panel * kPanelOutputs;
  const std::int64_t count = std::min(num_panels * kPanelOutputs, weight.out_features - output);
  float bias[kMostPanels * kPanelOutputs] = {};
  if (args.bias != nullptr) widen_all(args.dtype, static_cast<const char*>(args.bias) + output * item_size(args.dtype), bias, count);
  for (std::int64_t row = 0; row < rows.num_rows; row += pass_rows) {
    const QuantizedTask task{&weight, &rows, row, std::min(pass_rows, rows.num_rows - row), first_panel, num_panels,
                             memory, memory + kTotals};
    multiply(task);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
      float* totals = task.totals + r * num_panels * kPanelOutputs;
      add_bias(totals, bias, count);
      char* out = static_cast<char*>(args.out) + ((first + row + r) * weight.out_features + output) * item_size(args.dtype);
      narrow_all(args.dtype, totals, out, count);
    }
  }
}

}  // namespace

std::int64_t quantized_linear_bytes(std::int64_t num_rows, std::int64_t in_features, std::int64_t block_size, bool rounds_rows,
                                    int num_threads) {
  const std::int64_t rows = Rows::most_rows(num_rows), blocks = (in_features + block_size - 1) / block_size;
  const std::int64_t row = rounds_rows ? blocks * (block_size + 12) : blocks * (4 * block_size + 4);
  return rows * row + num_threads * (4 * (kTotals + kScales) + (rounds_rows ? 4 * blocks * block_size : 0));
}

void quantized_linear(const QuantizedLinearArgs& args) {
  const PackedWeight& weight = args.weight;
  if (args.num_rows == 0) return;
  const QuantizedVersion& version = versions.chosen();
  const QuantizedCode& code = version.of(weight.rounds_rows, args.num_rows);
  const bool takes_halves = !weight.rounds_rows && code.takes_halves != nullptr && code.takes_halves(weight, args.dtype);
  const bool stays_half = takes_halves && (code.multiply_flushed == nullptr || args.num_rows >= version.least_half_rows(weight.kind));
  Rows rows(args, code, stays_half);
  const auto multiply = weight.rounds_rows ? code.multiply_whole
                        : stays_half       ? code.multiply_halves
                        : takes_halves     ? code.multiply_flushed
                                           : code.multiply;
  // Waking a thread takes some microseconds, in which a core multiplies about 64K numbers.
  const bool worth_threads = args.num_rows * weight.in_features * weight.out_features > (1 << 18);
  const int num_threads = worth_threads ? args.num_threads : 1;
  const std::int64_t granules = (weight.num_panels() + kMostPanels - 1) / kMostPanels;
  const Array<float> memory((kTotals + kScales) * num_threads);
  for (std::int64_t first = 0; first < args.num_rows; first += kPreparedRows) {
    const std::int64_t num_rows = std::min(kPreparedRows, args.num_rows - first);
    const PreparedRows prepared = rows.prepared(num_rows);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < num_rows; ++row) rows.prepare(first + row, row);
#pragma omp for schedule(static)
      for (int part = 0; part < num_threads; ++part) {
        const std::int64_t end = granules * (part + 1) / num_threads;
        for (std::int64_t granule = granules * part / num_threads; granule < end; ++granule) {
          const std::int64_t panel = granule * kMostPanels, count = std::min(kMostPanels, weight.num_panels() - panel);
          compute_panels(args, prepared, first, panel, count, rows.pass_rows(), multiply, memory.data() + part * (kTotals + kScales));
        }
      }
    }
  }
}

std::vector<std::string> quantized_linear_versions() { return versions.names(); }

void choose_quantized_linear_version(const std::string& name) { versions.choose(name); }

}  // namespace specdec
