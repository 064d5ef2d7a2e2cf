#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/amx_tiles.h"
#include "kernels/intrinsics.h"
#include "kernels/quantized_work.h"

#define SPECDEC_ISA quantized_portable
#define SPECDEC_LANES 4
#define SPECDEC_TILES PortableTiles
#include "kernels/quantized_kernel.h"
