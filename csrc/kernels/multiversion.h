// One source, several instruction sets: the loader picks the best clone for the machine on which it runs, so a wheel needs
// no -march. For another processor, or with a C library or compiler without ifunc, only the plain version is built.
#pragma once

#include <cstdlib>  // defines __GLIBC__ where it is the C library

#ifdef __FAST_MATH__
#error "specdec_fast: -ffast-math and -Ofast reorder sums, and a row would have other bits in another batch; leave them out"
#endif

#define SPECDEC_INLINE inline __attribute__((always_inline))

#if !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__) || defined(__clang__) || \
    defined(SPECDEC_NO_MULTIVERSION)
#define SPECDEC_MULTIVERSION
#elif __GNUC__ >= 12
#define SPECDEC_X86_64_LEVELS  // __builtin_cpu_supports and target accept these levels, too
#define SPECDEC_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // older compilers accept no micro-architecture levels here, and AVX-512 only without 16-bit lanes
#define SPECDEC_MULTIVERSION __attribute__((target_clones("avx2", "default")))
#endif
