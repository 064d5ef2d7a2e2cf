#include <algorithm>
#include <cstring>

#include "kernels/conversions.h"
#include "kernels/intrinsics.h"
#include "kernels/linear_transposed_work.h"

#define SPECDEC_ISA transposed_portable
#define SPECDEC_LANES 4
#include "kernels/linear_transposed_kernel.h"
