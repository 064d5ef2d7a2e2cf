// The arithmetic of linear, included once per instruction set (attention_kernel.h explains why). SPECDEC_ISA names the
// namespace, SPECDEC_LANES the number of floats in its vectors. SPECDEC_DOT_BF16 is defined where one instruction adds the
// products of bf16 pairs, and SPECDEC_TILES, a class of amx_tiles.h, where the kernel on tiles is to be compiled.
//
// An output is summed in kLanes lanes. Lane l adds units l, l + kLanes, ... of a chunk in order, chunk after chunk; then the
// lanes are added in pairs. So no bit depends on how rows and outputs are divided into blocks, nor on the thread. Few rows
// are multiplied with the weights in place, with lanes along the inputs (linear_rows.h). Many rows are multiplied with
// panels of transposed weights (linear_panels.h).

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/linear_vectors.h"

constexpr std::int64_t kChunkSteps = SPECDEC_LANES == 16 ? 64 : 1024 / SPECDEC_LANES;  // longer sums lose too much to rounding
constexpr std::int64_t kWeightRows = 6;  // transposing weights takes about as long as multiplying them with so many rows

#include "kernels/linear_panels.h"
#include "kernels/linear_lane_sums.h"
#include "kernels/linear_rows.h"

// The number of rows from which on panels are worth transposing the weights. With vectors of 16 lanes, linear_rows.h
// multiplies about as fast, but short rows take it long to add the lanes, and long ones leave it fewer outputs in the
// second-level cache. Widened numbers take twice as many steps to transpose.
template <typename Product>
std::int64_t least_panel_rows(std::int64_t in_features, std::int64_t num_steps) {
  if (kLanes == 16) return std::min<std::int64_t>(5 * num_steps, num_steps < 128 ? 64 : 48);
  constexpr std::int64_t kMost = Product::kStep * sizeof(typename Product::Storage) < sizeof(Vector) ? 48 : 24;
  return std::max<std::int64_t>(12, std::min(kMost, in_features / 32));
}

template <typename Format, typename Product>
LinearPlan plan(const LinearArgs& args) {
  constexpr std::int64_t kVectorBytes = sizeof(Vector);
  const std::int64_t num_steps = (args.in_features + Product::kStep - 1) / Product::kStep;
  if (args.num_rows < least_panel_rows<Product>(args.in_features, num_steps)) {
    const std::int64_t height = even_height(args.num_rows, kMostRows), block_bytes = height * num_steps * kVectorBytes;
    return {prepare_rows<Product>, row_outputs<Format, Product>, num_steps, height, block_bytes,
            most_blocks(block_bytes), kGranule, 0, kWeightRows};
  }
  const int at_once = lanes_at_once(num_steps);
  const std::int64_t height = even_height(args.num_rows, kTileRows / at_once);
  const std::int64_t block_units = at_once == 1 ? block_stride(num_steps, height) : num_steps * height;  // of a lane
  const std::int64_t block_bytes = kLanes * block_units * static_cast<std::int64_t>(sizeof(float));
  return {at_once == 1 ? prepare_panels<Product> : prepare_rows<Product>, panel_outputs<Format, Product>,
          num_steps, height, block_bytes, most_blocks(block_bytes), kPanel,
          kLanes * panel_stride(num_steps) * kVectorBytes, kWeightRows};
}

constexpr LinearPlans kPlans = {plan<Float32, Widened<Float32>>, plan<Float16, Widened<Float16>>, plan<BFloat16, ProductBFloat16>};

#ifdef SPECDEC_TILES
#include "kernels/linear_tiles.h"
#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec
