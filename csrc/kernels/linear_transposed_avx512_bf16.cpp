#include <algorithm>
#include <cstring>

#include "kernels/conversions.h"
#include "kernels/intrinsics.h"
#include "kernels/linear_transposed_work.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#define SPECDEC_ISA transposed_avx512_bf16
#define SPECDEC_LANES 16
#define SPECDEC_DOT_BF16
#include "kernels/linear_transposed_kernel.h"
#pragma GCC pop_options
#endif
