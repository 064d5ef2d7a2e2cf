// The task of conv_rows_, included once per instruction set, after recurrent_channels.h.

namespace specdec {
namespace SPECDEC_ISA {

// One row's outputs: `total` holds the bias. Of `inputs`, a ring, `oldest` is the place of the first.
SPECDEC_INLINE void convolve(const float* __restrict weight, const float* __restrict inputs, std::int64_t oldest,
                             std::int64_t kernel, bool silu, float* __restrict total) {
  for (std::int64_t j = 0; j < kernel; ++j) {
    const float* __restrict input = inputs + (oldest + j) % kernel * kBlock;
    for (int i = 0; i < kBlock; ++i) total[i] += weight[j * kBlock + i] * input[i];
  }
  for (int i = 0; silu && i < kBlock; ++i) total[i] = total[i] / (1.0f + exp_of(-total[i]));
}

template <typename Format>
void conv_task(const ConvRowsArgs& args, const ChannelBlock& block, float* scratch) {
  using Storage = typename Format::Storage;
  const SequenceRows rows = sequence_rows(args.batch, block.sequence);
  const std::int64_t num_own = rows.count - rows.num_replayed, position = rows.position + rows.num_replayed;
  const std::int64_t kernel = args.kernel;
  float* weight = scratch;                    // [kernel, kBlock]
  float* inputs = scratch + kernel * kBlock;  // [kernel, kBlock]: that of position p at place p % kernel
  std::memset(scratch, 0, static_cast<std::size_t>(2 * kernel * kBlock) * sizeof(float));
  for (std::int64_t i = 0; i < block.width; ++i) {
    const Storage* own = as<Storage>(args.weight) + (block.first + i) * kernel;
    for (std::int64_t j = 0; j < kernel; ++j) weight[j * kBlock + i] = Format::load(own[j]);
  }
  float bias[kBlock] = {};
  if (args.bias) load_numbers<Format>(as<Storage>(args.bias) + block.first, bias, block.width);
  Storage* state = static_cast<Storage*>(args.state) + rows.slot * args.num_places * args.channels + block.first;
  for (std::int64_t p = std::max<std::int64_t>(0, position - kernel + 1); p < position; ++p) {
    load_numbers<Format>(state + p % args.num_places * args.channels, inputs + p % kernel * kBlock, block.width);
  }
  for (std::int64_t row = 0; row < num_own; ++row) {
    const Storage* from = as<Storage>(args.rows) + (rows.first + row) * args.stride_row + block.first;
    const std::int64_t p = position + row;
    load_numbers<Format>(from, inputs + p % kernel * kBlock, block.width);
    float total[kBlock];
    copy_numbers(bias, total, kBlock);
    convolve(weight, inputs, (p + 1) % kernel, kernel, args.silu, total);
    store_numbers<Format>(total, static_cast<Storage*>(args.out) + (rows.first + row) * args.channels + block.first,
                          block.width);
  }
  // Only now, because a row's input may take the place of one that was read. Of many rows, the last ones stay.
  for (std::int64_t row = std::max<std::int64_t>(0, num_own - args.num_places); row < num_own; ++row) {
    std::memcpy(state + (position + row) % args.num_places * args.channels,
                as<Storage>(args.rows) + (rows.first + row) * args.stride_row + block.first,
                static_cast<std::size_t>(block.width) * sizeof(Storage));
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
