#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/amx_tiles.h"
#include "kernels/attention_task.h"
#include "kernels/exponential.h"
#include "kernels/intrinsics.h"

#ifdef SPECDEC_X86_64_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define SPECDEC_ISA attention_x86_64_v3
#define SPECDEC_LANES 8
#include "kernels/attention_tile.h"
#include "kernels/attention_products.h"
#include "kernels/attention_few.h"
#include "kernels/attention_softmax.h"
#include "kernels/attention_amx.h"
#include "kernels/attention_kernel.h"
#pragma GCC pop_options
#endif
