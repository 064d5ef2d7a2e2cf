// The kernel of one instruction set, SPECDEC_ISA: included once for each. SPECDEC_LANES is the number of floats in a vector.

#include "kernels/recurrent_channels.h"
#include "kernels/recurrent_conv.h"
#include "kernels/recurrent_linear_attention.h"
#include "kernels/recurrent_scan.h"

namespace specdec {
namespace SPECDEC_ISA {

const RecurrentKernel kKernel{
    kConvBlock,
    kBlock,
    {conv_task<Float32>, conv_task<Float16>, conv_task<BFloat16>},
    {linear_attention_task<Float32>, linear_attention_task<Float16>, linear_attention_task<BFloat16>},
    {selective_scan_task<Float32>, selective_scan_task<Float16>, selective_scan_task<BFloat16>}};

}  // namespace SPECDEC_ISA
}  // namespace specdec
