// What the kernels need of the machine: an instruction set, threads, working memory.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cpu/args.h"
#include "cpu/chain.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace specdec {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// SPECDEC_CPU_ISA caps the choice, so that every variant can be tested on one machine.
Isa choose_isa() {
#if defined(__x86_64__)
  const char* cap = std::getenv("SPECDEC_CPU_ISA");
  const bool baseline = cap && std::strcmp(cap, "baseline") == 0, avx2 = cap && std::strcmp(cap, "avx2") == 0;
  if (!baseline && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (!baseline && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

// Memory of one thread, freed with it.
struct Arena {
  float* memory = nullptr;
  int64_t size = 0;
  ~Arena() { std::free(memory); }

  float* reserve(int64_t floats) {
    if (floats > size) {
      // Allocated before the old block goes: a failure leaves everything that points into that one usable.
      void* larger = std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
      if (!larger) throw std::bad_alloc();
      std::free(memory);
      memory = static_cast<float*>(larger);
      size = floats;
    }
    return memory;
  }
};

constexpr int64_t kPad = 16;
// Below this many elements a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 16384;

// Subnormal numbers count, whatever the calling program has set on this thread (torch.set_flush_denormal does on one,
// but not on the others): the same bits on every thread.
class KeepSubnormals {
#if defined(__SSE2__)
 public:
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlags); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlags = 0x8040;  // flush to zero, denormals are zero
  unsigned saved_;
#elif defined(__aarch64__)
 public:
  KeepSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

int64_t cpu_isa() { return static_cast<int64_t>(isa()); }

}  // namespace

const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return kernels_avx512;
  if (isa() == Isa::kAvx2) return kernels_avx2;
#endif
  return kernels_baseline;
}

Scratch& thread_scratch(int64_t vocab) {
  thread_local Arena arena;
  thread_local Scratch scratch;
  thread_local int64_t capacity = 0;
  if (vocab > capacity) {
    const int64_t tiles = (vocab + kTile - 1) / kTile, row = (vocab + 2 * kPad) / kPad * kPad;
    const int64_t lanes = tiles * 16, per_tile = (tiles + kPad) / kPad * kPad;
    // Candidate arrays also hold the lane maxima, which a small vocabulary has more of than tokens.
    const int64_t candidates = row > lanes + kPad ? row : lanes + kPad;
    float* p = arena.reserve(lanes + 3 * per_tile + 4 * candidates);
    scratch.lane_max = p;
    scratch.tile_max = p += lanes;
    scratch.tile_sum = p += per_tile;
    scratch.tile_above = p += per_tile;
    scratch.values = p += per_tile;
    scratch.weights = p += candidates;
    scratch.work_values = p += candidates;
    scratch.work_weights = p += candidates;
    capacity = vocab;
  }
  return scratch;
}

RowDecision* decision_scratch(int64_t count) {
  thread_local Arena arena;
  const int64_t floats = (sizeof(RowDecision) + sizeof(float) - 1) / sizeof(float);
  return reinterpret_cast<RowDecision*>(arena.reserve((count < 1 ? 1 : count) * floats));
}

void parallel(int64_t n, int64_t elements, void (*body)(int64_t, void*), void* context) {
  int64_t threads = torch::stable::get_num_threads();
  threads = threads < n ? threads : n;
  threads = threads < elements / kWorthAThread ? threads : elements / kWorthAThread;
  if (threads <= 1) {
    [[maybe_unused]] const KeepSubnormals keep;
    for (int64_t i = 0; i < n; ++i) body(i, context);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const KeepSubnormals keep;
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i, context);
  });
}

}  // namespace specdec

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_NAMESPACE, m) { m.def("cpu_isa() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&specdec::cpu_isa));
}
