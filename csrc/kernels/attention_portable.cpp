#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/amx_tiles.h"
#include "kernels/attention_task.h"
#include "kernels/exponential.h"
#include "kernels/intrinsics.h"

#define SPECDEC_ISA attention_portable
#define SPECDEC_LANES 4
#define SPECDEC_TILES PortableTiles
#include "kernels/attention_tile.h"
#include "kernels/attention_products.h"
#include "kernels/attention_few.h"
#include "kernels/attention_softmax.h"
#include "kernels/attention_amx.h"
#include "kernels/attention_kernel.h"
