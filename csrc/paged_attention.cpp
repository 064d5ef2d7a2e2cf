#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "bounds.h"
#include "multiversion.h"

namespace specdec {
namespace {

constexpr std::int64_t kTile = 64;       // positions reduced together
constexpr std::int64_t kRowsPerTask = 16;  // query rows that share a tile's loads

#define SPECDEC_INLINE inline __attribute__((always_inline))

// Query rows of one sequence and one KV head.
struct Task {
  std::int64_t sequence;
  std::int64_t first_row;  // in the sequence
  std::int64_t num_rows;
  std::int64_t kv_head;
};

// fp32 working memory of one thread; q rows are (row, head of the group) pairs.
struct Scratch {
  std::vector<float> query, accumulated, maximum, sum, scores, key_tile, value_tile;
  std::vector<const float*> keys, values;

  Scratch(std::int64_t group, std::int64_t head_dim)
      : query(kRowsPerTask * group * head_dim),
        accumulated(kRowsPerTask * group * head_dim),
        maximum(kRowsPerTask * group),
        sum(kRowsPerTask * group),
        scores(kTile),
        key_tile(kTile * head_dim),
        value_tile(kTile * head_dim),
        keys(kTile),
        values(kTile) {}
};

// exp(x) for x <= 0 within 2 units in the last place: 2^n * e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial.
// Branchless, so that the loop around it vectorises. A NaN stays a NaN.
SPECDEC_INLINE float exp_nonpositive(float x) {
  x = x < -87.0f ? -87.0f : x;                         // 2^-126: below it nothing is left of a softmax term
  const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  float e = 1.98412698e-4f;
  e = e * r + 1.38888889e-3f;
  e = e * r + 8.33333333e-3f;
  e = e * r + 4.16666667e-2f;
  e = e * r + 1.66666667e-1f;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const std::uint32_t exponent = (bit_cast<std::uint32_t>(shifted) + 127u) << 23;
  return e * bit_cast<float>(exponent);
}

SPECDEC_INLINE float dot(const float* a, const float* b, std::int64_t size) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (std::int64_t i = 0; i < size; ++i) total += a[i] * b[i];
  return total;
}

// Fold positions [first, last) of the current tile into one query row (the online softmax of FlashAttention,
// arXiv 2205.14135, algorithm 1).
SPECDEC_INLINE void fold(const PagedAttentionArgs& args, Scratch& scratch, std::int64_t row, std::int64_t first,
                         std::int64_t last) {
  const std::int64_t head_dim = args.head_dim;
  const float* query = scratch.query.data() + row * head_dim;
  float* accumulated = scratch.accumulated.data() + row * head_dim;
  float* scores = scratch.scores.data();
  for (std::int64_t j = first; j < last; ++j) scores[j] = dot(query, scratch.keys[j], head_dim);
  if (args.softcap > 0) {
    for (std::int64_t j = first; j < last; ++j) scores[j] = args.softcap * std::tanh(scores[j] / args.softcap);
  }
  float maximum = scratch.maximum[row];
  for (std::int64_t j = first; j < last; ++j) maximum = std::max(maximum, scores[j]);
  const float rescale = exp_nonpositive(scratch.maximum[row] - maximum);
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t j = first; j < last; ++j) {
    scores[j] = exp_nonpositive(scores[j] - maximum);
    sum += scores[j];
  }
#pragma omp simd
  for (std::int64_t d = 0; d < head_dim; ++d) accumulated[d] *= rescale;
  for (std::int64_t j = first; j < last; ++j) {
    const float weight = scores[j];
    const float* value = scratch.values[j];
#pragma omp simd
    for (std::int64_t d = 0; d < head_dim; ++d) accumulated[d] += weight * value[d];
  }
  scratch.maximum[row] = maximum;
  scratch.sum[row] = scratch.sum[row] * rescale + sum;
}

// Point keys/values at fp32 rows of positions [first, last): the pages themselves, or a converted copy.
template <typename Type>
SPECDEC_INLINE void load_tile(const PagedAttentionArgs& args, Scratch& scratch, const Task& task, std::int64_t first,
                              std::int64_t last) {
  using Storage = typename Type::Storage;
  const std::int32_t* pages = args.block_table + task.sequence * args.max_pages;
  for (std::int64_t position = first; position < last; ++position) {
    const std::int64_t slot = pages[position / args.page_size] * args.page_size + position % args.page_size;
    const std::int64_t offset = (slot * args.num_kv_heads + task.kv_head) * args.head_dim;
    const Storage* key = static_cast<const Storage*>(args.key_cache) + offset;
    const Storage* value = static_cast<const Storage*>(args.value_cache) + offset;
    const std::int64_t j = position % kTile;
    if constexpr (std::is_same_v<Storage, float>) {
      scratch.keys[j] = key;
      scratch.values[j] = value;
    } else {
      float* key_row = scratch.key_tile.data() + j * args.head_dim;
      float* value_row = scratch.value_tile.data() + j * args.head_dim;
#pragma omp simd
      for (std::int64_t d = 0; d < args.head_dim; ++d) {
        key_row[d] = Type::load(key[d]);
        value_row[d] = Type::load(value[d]);
      }
      scratch.keys[j] = key_row;
      scratch.values[j] = value_row;
    }
  }
}

template <typename Type>
SPECDEC_INLINE void run_task(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  using Storage = typename Type::Storage;
  const std::int64_t group = args.num_heads / args.num_kv_heads, head_dim = args.head_dim;
  const std::int64_t first_query = args.cu_seqlens_q[task.sequence] + task.first_row;
  const std::int64_t sequence_rows = args.cu_seqlens_q[task.sequence + 1] - args.cu_seqlens_q[task.sequence];
  const std::int64_t first_position = args.seqused_k[task.sequence] - sequence_rows + task.first_row;
  const std::int64_t context = first_position + task.num_rows;  // positions the last row sees
  for (std::int64_t i = 0; i < task.num_rows * group; ++i) {
    const Storage* query = static_cast<const Storage*>(args.query) +
                           (first_query + i / group) * args.stride_query_row +
                           (task.kv_head * group + i % group) * args.stride_query_head;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      scratch.query[i * head_dim + d] = Type::load(query[d]) * args.scale;
      scratch.accumulated[i * head_dim + d] = 0.0f;
    }
    scratch.maximum[i] = -std::numeric_limits<float>::infinity();
    scratch.sum[i] = 0.0f;
  }
  const auto first_visible = [&](std::int64_t position) {
    return args.sliding_window > 0 ? std::max<std::int64_t>(0, position - args.sliding_window + 1) : 0;
  };
  for (std::int64_t tile = first_visible(first_position) / kTile * kTile; tile < context; tile += kTile) {
    load_tile<Type>(args, scratch, task, std::max(tile, first_visible(first_position)),
                    std::min(tile + kTile, context));
    for (std::int64_t i = 0; i < task.num_rows * group; ++i) {
      const std::int64_t position = first_position + i / group;
      const std::int64_t first = std::max(tile, first_visible(position));
      const std::int64_t last = std::min(tile + kTile, position + 1);
      if (first < last) fold(args, scratch, i, first - tile, last - tile);
    }
  }
  for (std::int64_t i = 0; i < task.num_rows * group; ++i) {
    Storage* out = static_cast<Storage*>(args.out) +
                   ((first_query + i / group) * args.num_heads + task.kv_head * group + i % group) * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      out[d] = Type::store(scratch.accumulated[i * head_dim + d] / scratch.sum[i]);
    }
  }
}

SPECDEC_MULTIVERSION
void run_float32(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  run_task<Float32>(args, scratch, task);
}

SPECDEC_MULTIVERSION
void run_float16(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  run_task<Float16>(args, scratch, task);
}

SPECDEC_MULTIVERSION
void run_bfloat16(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  run_task<BFloat16>(args, scratch, task);
}

void run(const PagedAttentionArgs& args, Scratch& scratch, const Task& task) {
  switch (args.dtype) {
    case DType::kFloat32: return run_float32(args, scratch, task);
    case DType::kFloat16: return run_float16(args, scratch, task);
    case DType::kBFloat16: return run_bfloat16(args, scratch, task);
  }
}

void check(const PagedAttentionArgs& args) {
  if (args.cu_seqlens_q[0] != 0 || args.cu_seqlens_q[args.batch_size] > args.num_rows) {
    throw std::out_of_range("cu_seqlens_q goes from " + std::to_string(args.cu_seqlens_q[0]) + " to " +
                            std::to_string(args.cu_seqlens_q[args.batch_size]) + "; there are " +
                            std::to_string(args.num_rows) + " rows");
  }
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int64_t context = args.seqused_k[b];
    const std::int64_t rows = args.cu_seqlens_q[b + 1] - args.cu_seqlens_q[b];
    if (rows < 0 || context < rows || context > args.max_pages * args.page_size) {
      throw std::out_of_range("sequence " + std::to_string(b) + " has " + std::to_string(rows) + " rows and " +
                              std::to_string(context) + " KV entries; its block table has room for " +
                              std::to_string(args.max_pages * args.page_size));
    }
    check_pages(args.block_table, args.max_pages, args.page_size, args.num_pages, b, context);
  }
}

std::vector<Task> make_tasks(const PagedAttentionArgs& args) {
  std::vector<Task> tasks;
  for (std::int64_t b = 0; b < args.batch_size; ++b) {
    const std::int64_t rows = args.cu_seqlens_q[b + 1] - args.cu_seqlens_q[b];
    for (std::int64_t row = 0; row < rows; row += kRowsPerTask) {
      for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
        tasks.push_back({b, row, std::min(kRowsPerTask, rows - row), head});
      }
    }
  }
  return tasks;
}

}  // namespace

void paged_attention(const PagedAttentionArgs& args) {
  check(args);
  const std::vector<Task> tasks = make_tasks(args);
  const std::int64_t num_tasks = static_cast<std::int64_t>(tasks.size());
#pragma omp parallel num_threads(args.num_threads) if (num_tasks > 1)
  {
    Scratch scratch(args.num_heads / args.num_kv_heads, args.head_dim);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < num_tasks; ++i) run(args, scratch, tasks[i]);
  }
}

}  // namespace specdec
