#include <cmath>
#include <cstring>

#include "kernels/exponential.h"
#include "kernels/intrinsics.h"
#include "kernels/recurrent_work.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define SPECDEC_ISA recurrent_x86_64_v4
#define SPECDEC_LANES 16
#include "kernels/recurrent_kernel.h"
#pragma GCC pop_options
#endif
