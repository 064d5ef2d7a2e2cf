// The task of selective_scan_rows_, included once per instruction set, after recurrent_channels.h.

namespace specdec {
namespace SPECDEC_ISA {

// The inputs of one row for a block of channels.
struct ScanRow {
  float x[kBlock] = {};
  float dt[kBlock] = {};
  float* b;  // [state_dim]
  float* c;  // [state_dim]
};

// Advances the state by one row, and reads it.
SPECDEC_INLINE void scan_row(const ScanRow& row, const float* __restrict a, std::int64_t state_dim,
                             float* __restrict state, float* __restrict out) {
  Vector dt[kVectors], change[kVectors], read[kVectors] = {};
  for (int v = 0; v < kVectors; ++v) {
    dt[v] = load_vector(row.dt + v * kLanes);
    change[v] = dt[v] * load_vector(row.x + v * kLanes);
  }
  for (std::int64_t n = 0; n < state_dim; ++n) {
    const float b = row.b[n], c = row.c[n];
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t at = n * kBlock + v * kLanes;
      const Vector decay = exp_of(dt[v] * load_vector(a + at));
      const Vector next = multiply_add(decay, load_vector(state + at), change[v] * b);
      store_as(state + at, next);
      read[v] = multiply_add(next, splat(c), read[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) store_as(out + v * kLanes, read[v]);
}

template <typename Format>
void selective_scan_task(const SelectiveScanRowsArgs& args, const ChannelBlock& block, float* scratch) {
  using Storage = typename Format::Storage;
  const SequenceRows rows = sequence_rows(args.batch, block.sequence);
  const std::int64_t size = args.state_dim, group = block.part;
  const std::int64_t channel = group * (args.channels / args.num_groups) + block.first;
  float* state = scratch;              // [state_dim, kBlock]
  float* a = scratch + size * kBlock;  // [state_dim, kBlock]
  ScanRow own;
  own.b = a + size * kBlock;
  own.c = own.b + size;
  std::memset(a, 0, static_cast<std::size_t>(size * (kBlock + 2)) * sizeof(float));
  for (std::int64_t n = 0; n < size; ++n) {
    const float* from = args.a + n * args.stride_a_state + channel * args.stride_a_channel;
    for (std::int64_t i = 0; i < block.width; ++i) a[n * kBlock + i] = from[i * args.stride_a_channel];
  }
  float* states = args.states + rows.slot * size * args.channels + channel;
  load_state(rows.position > 0 ? states : nullptr, size, args.channels, block.width, state);
  for (std::int64_t i = 0;; ++i) {
    if (i == rows.num_stored) store_state(state, size, args.channels, block.width, states);
    if (i == rows.count) return;
    float* kept = i < rows.num_replayed || i >= rows.num_stored
                      ? args.kept + (rows.slot * args.num_kept + (rows.position + i) % args.num_kept) * args.kept_width()
                      : nullptr;
    const std::int64_t row = i < rows.num_replayed ? -1 : rows.first + i - rows.num_replayed;
    if (row < 0) {
      copy_numbers(kept + channel, own.x, block.width);
      copy_numbers(kept + args.channels + channel, own.dt, block.width);
      copy_numbers(kept + 2 * args.channels + group * size, own.b, size);
    } else {
      load_numbers<Format>(as<Storage>(args.x) + row * args.stride_x_row + channel, own.x, block.width);
      copy_numbers(args.dt + row * args.stride_dt_row + channel, own.dt, block.width);
      load_numbers<Format>(as<Storage>(args.b) + row * args.stride_b_row + group * args.stride_b_group, own.b, size);
      load_numbers<Format>(as<Storage>(args.c) + row * args.stride_c_row + group * args.stride_c_group, own.c, size);
    }
    if (row >= 0 && kept) {
      copy_numbers(own.x, kept + channel, block.width);
      copy_numbers(own.dt, kept + args.channels + channel, block.width);
      if (block.first == 0) copy_numbers(own.b, kept + 2 * args.channels + group * size, size);
    }
    float out[kBlock];
    scan_row(own, a, size, state, out);
    if (row < 0) continue;
    for (std::int64_t j = 0; args.skip && j < block.width; ++j) out[j] += args.skip[channel + j] * own.x[j];
    store_numbers<Format>(out, static_cast<Storage*>(args.out) + row * args.channels + channel, block.width);
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
