// The task of conv_rows_, included once per instruction set, after recurrent_channels.h.

namespace specdec {
namespace SPECDEC_ISA {

constexpr std::int64_t kConvBlock = 16 * kBlock;  // so many that a task reads runs of memory of its rows

// One row's outputs, in whole vectors: `total` holds the bias. Of `inputs`, a ring, `oldest` is the place of the first.
SPECDEC_INLINE void convolve(const float* __restrict weight, const float* __restrict inputs, std::int64_t oldest,
                             std::int64_t kernel, std::int64_t width, float* __restrict total) {
  for (std::int64_t i = 0; i < width; i += kLanes) {
    Vector sum = load_vector(total + i);
    for (std::int64_t j = 0, place = oldest; j < kernel; ++j) {
      sum = multiply_add(load_vector(weight + j * kConvBlock + i), load_vector(inputs + place * kConvBlock + i), sum);
      place = place + 1 < kernel ? place + 1 : 0;
    }
    store_as(total + i, sum);
  }
}

SPECDEC_INLINE void apply_silu(float* __restrict numbers, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vector x = load_vector(numbers + i);
    store_as(numbers + i, x / (1.0f + exp_of(-x)));
  }
}

template <typename Format>
void conv_task(const ConvRowsArgs& args, const ChannelBlock& block, float* scratch) {
  using Storage = typename Format::Storage;
  const SequenceRows rows = sequence_rows(args.batch, block.sequence);
  const std::int64_t num_own = rows.count - rows.num_replayed, position = rows.position + rows.num_replayed;
  const std::int64_t kernel = args.kernel, width = (block.width + kBlock - 1) / kBlock * kBlock;
  float* weight = scratch;                          // [kernel, kConvBlock]
  float* inputs = weight + kernel * kConvBlock;     // [kernel, kConvBlock]: that of position p at place p % kernel
  float* bias = inputs + kernel * kConvBlock;       // [kConvBlock]
  float* total = bias + kConvBlock;                 // [kConvBlock]
  std::memset(scratch, 0, static_cast<std::size_t>(scratch_of(args, kConvBlock)) * sizeof(float));
  for (std::int64_t j = 0; j < kernel; ++j) {  // stores side by side: those of a channel would share a set of the cache
    const Storage* own = as<Storage>(args.weight) + block.first * kernel + j;
    for (std::int64_t i = 0; i < block.width; ++i) weight[j * kConvBlock + i] = Format::load(own[i * kernel]);
  }
  if (args.bias) load_numbers<Format>(as<Storage>(args.bias) + block.first, bias, block.width);
  Storage* state = static_cast<Storage*>(args.state) + rows.slot * args.num_places * args.channels + block.first;
  for (std::int64_t p = std::max<std::int64_t>(0, position - kernel + 1); p < position; ++p) {
    load_numbers<Format>(state + p % args.num_places * args.channels, inputs + p % kernel * kConvBlock, block.width);
  }
  std::int64_t place = position % kernel;
  for (std::int64_t row = 0; row < num_own; ++row) {
    const Storage* from = as<Storage>(args.rows) + (rows.first + row) * args.stride_row + block.first;
    Storage* out = static_cast<Storage*>(args.out) + (rows.first + row) * args.channels + block.first;
    load_numbers<Format>(from, inputs + place * kConvBlock, block.width);
    place = place + 1 < kernel ? place + 1 : 0;
    copy_numbers(bias, total, width);
    convolve(weight, inputs, place, kernel, width, total);
    if (args.silu) apply_silu(total, width);
    store_numbers<Format>(total, out, block.width);
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
