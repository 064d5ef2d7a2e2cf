// The intrinsics of the processor, for vectors.h: which is included in a namespace, and can include nothing itself.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
