#include <cstring>
#include <type_traits>

#include "kernels/intrinsics.h"
#include "kernels/linear_work.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define SPECDEC_ISA linear_x86_64_v4
#define SPECDEC_LANES 16
#include "kernels/linear_kernel.h"
#pragma GCC pop_options
#endif
