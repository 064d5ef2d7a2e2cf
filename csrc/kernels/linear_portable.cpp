#include <cstring>
#include <type_traits>

#include "kernels/amx_tiles.h"
#include "kernels/intrinsics.h"
#include "kernels/linear_work.h"

#define SPECDEC_ISA linear_portable
#define SPECDEC_LANES 4
#define SPECDEC_TILES PortableTiles
#include "kernels/linear_kernel.h"
