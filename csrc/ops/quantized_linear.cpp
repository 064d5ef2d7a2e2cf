#include "ops/quantized_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/amx_tiles.h"
#include "kernels/conversions.h"
#include "kernels/multiversion.h"
#include "kernels/quantized_work.h"
#include "kernels/row_rounding.h"
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
  constexpr std::int64_t kChunkRows = 4;  // measured on a Zen 4: from so many rows on, chunks are faster with VNNI
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back({"x86-64-v3", {v3, v3, v3}});
  if (__builtin_cpu_supports("x86-64-v4")) {
    usable.push_back({"x86-64-v4", {v4, v3, v3}});  // without VNNI, 512 bits lack an instruction that 256 bits have
    if (__builtin_cpu_supports("avx512vnni")) {
      usable.push_back({"avx512-vnni", {v4, vnni, &quantized_avx512_vnni::kChunkCode, 0, 0, kChunkRows}});
      if (__builtin_cpu_supports("amx-int8") && permitted_amx()) usable.push_back({"amx", {amx, vnni, amx, kHalfRows, kTableRows, kWholeRows}});
    }
  }
#endif
  return usable;
}

Versions<QuantizedVersion> versions("quantized_linear", usable());

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

// The rows of a call, prepared for its kernel, up to kPreparedRows at a time.
class Rows {
 public:
  // `stays_half`: whether rows of bf16 are multiplied as they are.
  Rows(const QuantizedLinearArgs& args, const QuantizedCode& code, bool stays_half)
      : args_(args),
        by_tile_(stays_half || (args.weight.rounds_rows && code.whole_tiles)),
        stays_half_(stays_half),
        pass_rows_(code.pass_rows),
        offset_(args.weight.rounds_rows ? code.offset_of(args.weight) : 0),
        memory_(by_tile_ ? most_rows(args.num_rows) : std::min(args.num_rows, kPreparedRows), args.weight, stays_half) {}

  // Rows for which there is memory where tiles read them: 16 at a time, whatever their number.
  static std::int64_t most_rows(std::int64_t num_rows) {
    return (std::min(num_rows, kPreparedRows) + kTileHeight - 1) / kTileHeight * kTileHeight;
  }

  // Numbers that a thread keeps while it prepares rows.
  std::int64_t own_numbers() const { return keeps_numbers() ? 0 : args_.weight.padded(); }

  // Prepares row `row` of the call as row `to`; `own` is memory of this thread.
  void prepare(std::int64_t row, std::int64_t to, float* own) {
    const PackedWeight& weight = args_.weight;
    const auto* from = static_cast<const char*>(args_.rows) + row * args_.row_stride * item_size(args_.dtype);
    const std::int64_t blocks = weight.num_blocks(), size = weight.block_size;
    if (stays_half_) copy_halves(from, to);
    if (stays_half_ && weight.mins == nullptr) return;
    float* numbers = keeps_numbers() ? memory_.numbers.data() + to * weight.padded() : own;
    widen_all(args_.dtype, from, numbers, weight.in_features);
    std::fill(numbers + weight.in_features, numbers + weight.padded(), 0.0f);
    if (!weight.rounds_rows) {
      for (std::int64_t block = 0; weight.mins != nullptr && block < blocks; ++block) {
        memory_.sums.data()[place(to, block)] = std::accumulate(numbers + block * size, numbers + (block + 1) * size, 0.0f);
      }
      return;
    }
    const std::int64_t at = place(to, 0);
    const RoundedRow rounded{memory_.whole.data() + at * size, memory_.steps.data() + at, memory_.sums.data() + at,
                             memory_.offsets.data() + at, by_tile_ ? kTileHeight : 1, offset_};
    (size == 16 ? round_blocks_of_16 : round_blocks_of_32)(numbers, blocks, rounded);
  }

  PreparedRows prepared(std::int64_t num_rows) const {
    return {num_rows, args_.weight.padded(), memory_.numbers.data(), memory_.halves.data(), memory_.whole.data(),
            memory_.steps.data(), memory_.offsets.data(), memory_.sums.data()};
  }

  // Rows that are multiplied with a part of the weights while it stays in a cache.
  std::int64_t pass_rows() const { return by_tile_ ? kPreparedRows : pass_rows_; }

 private:
  bool keeps_numbers() const { return !args_.weight.rounds_rows && !stays_half_; }

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
  std::int64_t pass_rows_;
  int offset_;
  RowMemory memory_;
};

constexpr std::int64_t kTotals = kPreparedRows * kMostPanels * kPanelOutputs;
constexpr std::int64_t kScales = 2 * kMostPanels * kScaleBlocks * kPanelOutputs;

// The totals of some rows, a row after the other, and where their outputs belong.
struct Outputs {
  const float *totals, *bias;
  std::int64_t num_rows, row_totals;  // totals of a row, of which the first `count` are outputs
  std::int64_t count;
  void* to;
  std::int64_t row_stride;  // elements
};

// Tiles and vectors make NaNs of other bits, and zeros of other signs: a bias of 0 makes every zero positive.
template <typename Format>
SPECDEC_INLINE void store_outputs(const Outputs& outputs) {
  const float* __restrict totals = outputs.totals;
  const float* __restrict bias = outputs.bias;
  auto* __restrict to = static_cast<typename Format::Storage*>(outputs.to);
  for (std::int64_t row = 0; row < outputs.num_rows; ++row, totals += outputs.row_totals, to += outputs.row_stride) {
    for (std::int64_t i = 0; i < outputs.count; ++i) {
      const float total = totals[i] + bias[i];
      to[i] = Format::store(total == total ? total : std::numeric_limits<float>::quiet_NaN());
    }
  }
}

SPECDEC_MULTIVERSION
void store_floats(const Outputs& outputs) { store_outputs<Float32>(outputs); }
SPECDEC_MULTIVERSION
void store_halves(const Outputs& outputs) { store_outputs<Float16>(outputs); }
SPECDEC_MULTIVERSION
void store_bfloats(const Outputs& outputs) { store_outputs<BFloat16>(outputs); }

// Computes the outputs of some panels for the prepared rows, which begin at row `first` of the call.
void compute_panels(const QuantizedLinearArgs& args, const PreparedRows& rows, std::int64_t first, std::int64_t first_panel,
                    std::int64_t num_panels, std::int64_t pass_rows, void (*multiply)(const QuantizedTask&), float* memory) {
  const PackedWeight& weight = args.weight;
  const std::int64_t output = first_panel * kPanelOutputs;
  const std::int64_t count = std::min(num_panels * kPanelOutputs, weight.out_features - output);
  float bias[kMostPanels * kPanelOutputs] = {};
  if (args.bias != nullptr) widen_all(args.dtype, static_cast<const char*>(args.bias) + output * item_size(args.dtype), bias, count);
  const auto store = args.dtype == DType::kFloat32 ? store_floats : args.dtype == DType::kFloat16 ? store_halves : store_bfloats;
  for (std::int64_t row = 0; row < rows.num_rows; row += pass_rows) {
    const QuantizedTask task{&weight, &rows, row, std::min(pass_rows, rows.num_rows - row), first_panel, num_panels,
                             memory, memory + kTotals};
    multiply(task);
    char* out = static_cast<char*>(args.out) + ((first + row) * weight.out_features + output) * item_size(args.dtype);
    store({task.totals, bias, task.num_rows, num_panels * kPanelOutputs, count, out, weight.out_features});
  }
}

// The granules of a call, in one part for each thread. A thread that has computed its part takes what is left of the others,
// because cores differ in speed, and other processes take some of their time.
class Parts {
 public:
  Parts(std::int64_t num_granules, int count) : num_granules_(num_granules), parts_(static_cast<std::size_t>(count)) {
    for (int part = 0; part < count; ++part) parts_[part].next = begin_of(part);
  }

  // The next granule for the thread of `own`, or -1.
  std::int64_t next(int own) {
    const int count = static_cast<int>(parts_.size());
    for (int turn = 0; turn < count; ++turn) {
      const int part = (own + turn) % count;
      if (parts_[part].next.load(std::memory_order_relaxed) >= begin_of(part + 1)) continue;
      const std::int64_t granule = parts_[part].next.fetch_add(1, std::memory_order_relaxed);
      if (granule < begin_of(part + 1)) return granule;
    }
    return -1;
  }

 private:
  struct alignas(64) Part {  // a line of the cache, so that threads do not wait for each other
    std::atomic<std::int64_t> next{0};
  };

  std::int64_t begin_of(int part) const { return num_granules_ * part / static_cast<std::int64_t>(parts_.size()); }

  std::int64_t num_granules_;
  std::vector<Part> parts_;
};

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
    Parts parts(granules, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      const Array<float> own(rows.own_numbers());
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < num_rows; ++row) rows.prepare(first + row, row, own.data());
#pragma omp for schedule(static)
      for (int part = 0; part < num_threads; ++part) {
        for (std::int64_t granule = parts.next(part); granule >= 0; granule = parts.next(part)) {
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
