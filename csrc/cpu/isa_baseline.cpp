// The kernels for the compiler's default instruction set (SSE2 on x86-64, NEON on 64-bit Arm).
#include "cpu/args.h"
#include "cpu/chain.h"
#include "cpu/scratch.h"

#define SPECDEC_ISA baseline
#define SPECDEC_VECTOR_BYTES 16
#include "cpu/kernels.h"

namespace specdec {
const Kernels kernels_baseline = SPECDEC_KERNELS;
}
