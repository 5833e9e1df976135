// The kernels for AVX512. Standard headers come before the target is raised, so that no inline function of theirs is
// compiled for it and then shared with code that must run elsewhere.
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/args.h"
#include "cpu/chain.h"
#include "cpu/scratch.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define SPECDEC_ISA avx512
#define SPECDEC_VECTOR_BYTES 64
#include "cpu/kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace specdec {
const Kernels kernels_avx512 = SPECDEC_KERNELS;
}
#endif
