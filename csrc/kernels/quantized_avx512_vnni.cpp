#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/intrinsics.h"
#include "kernels/quantized_work.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define SPECDEC_ISA quantized_avx512_vnni
#define SPECDEC_LANES 16
#define SPECDEC_VNNI
#include "kernels/quantized_kernel.h"
#pragma GCC pop_options
#endif
