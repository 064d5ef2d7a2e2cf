#include <cmath>
#include <cstring>

#include "kernels/exponential.h"
#include "kernels/intrinsics.h"
#include "kernels/recurrent_work.h"

#define SPECDEC_ISA recurrent_portable
#define SPECDEC_LANES 4
#include "kernels/recurrent_kernel.h"
