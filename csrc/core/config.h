// Names and qualifiers that let the numerics in csrc/core compile for the host, per instruction set, and for CUDA
// devices.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define SPECDEC_HD inline __attribute__((always_inline))
#else
#define SPECDEC_HD inline
#endif

// Every translation unit that is compiled for a particular instruction set sets its own namespace, so that the linker
// never merges an inline function of one set with that of another.
#ifndef SPECDEC_ISA
#define SPECDEC_ISA generic
#endif
