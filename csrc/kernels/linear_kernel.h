// The arithmetic of linear, included once per instruction set (see attention_kernel.h for why): SPECDEC_ISA names the
// namespace, SPECDEC_LANES the floats of its vectors; SPECDEC_DOT_BF16 is defined where products of bf16 pairs are one
// instruction, and SPECDEC_TILES, a class of amx_tiles.h, where the kernel on tiles is wanted.
//
// An output is summed in kLanes lanes, lane l taking units l, l + kLanes, ... of a chunk in order, chunk after chunk, and
// the lanes are then added in pairs. So how rows and outputs are blocked, and by which thread, changes no bit. Few rows pass
// by the weights where these are, with lanes along the inputs; many pass by panels of transposed weights (linear_panels.h).

namespace specdec {
namespace SPECDEC_ISA {

#include "kernels/linear_vectors.h"

constexpr std::int64_t kChunkSteps = SPECDEC_LANES == 16 ? 64 : 1024 / SPECDEC_LANES;  // longer sums lose too much to rounding
constexpr std::int64_t kWeightRows = 6;             // in whose time weights are transposed, about

#include "kernels/linear_rows.h"
#include "kernels/linear_panels.h"

// From how many rows on panels are worth transposing weights: a pair of blocks saves more where inputs are few, and numbers
// that are widened take twice as many steps to transpose.
template <typename Format, typename Product>
std::int64_t least_panel_rows(std::int64_t in_features) {
  constexpr bool kWidens = Product::kStep * sizeof(typename Format::Storage) < sizeof(Vector), kPairs = Product::kStep > kLanes;
  constexpr std::int64_t kLeast = kPairs ? 4 : 12, kMost = kWidens ? 48 : kPairs ? 32 : 24;
  return std::max(kLeast, std::min(kMost, in_features / 32));
}

template <typename Format, typename Product>
LinearPlan plan(const LinearArgs& args) {
  constexpr std::int64_t kVectorBytes = sizeof(Vector);
  const std::int64_t num_steps = (args.in_features + Product::kStep - 1) / Product::kStep;
  if (args.num_rows < least_panel_rows<Format, Product>(args.in_features)) {
    const std::int64_t row_bytes = num_steps * kVectorBytes, height = even_height(args.num_rows, most_rows(row_bytes));
    const std::int64_t block_bytes = height * row_bytes;
    return {prepare_rows<Product>, row_outputs<Format, Product>, num_steps, height, block_bytes,
            most_blocks(block_bytes), kGranule, 0, kWeightRows};
  }
  const std::int64_t height = even_height(args.num_rows, kTileRows / lanes_at_once(num_steps));
  const std::int64_t block_bytes = kLanes * block_stride(num_steps, height) * static_cast<std::int64_t>(sizeof(float));
  return {prepare_panels<Product>, panel_outputs<Format, Product>, num_steps, height, block_bytes,
          most_blocks(block_bytes), kPanel, kLanes * panel_stride(num_steps) * kVectorBytes, kWeightRows};
}

constexpr LinearPlans kPlans = {plan<Float32, Widened<Float32>>, plan<Float16, Widened<Float16>>, plan<BFloat16, ProductBFloat16>};

#ifdef SPECDEC_TILES
#include "kernels/linear_tiles.h"
#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec
