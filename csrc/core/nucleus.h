// A row's distribution as three numbers, and the parameters that shape it.
#pragma once

#include "core/config.h"
#include "core/numerics.h"

namespace specdec::SPECDEC_ISA {

constexpr float kInf = __builtin_inff();
constexpr float kGreedyBelow = 1e-5f;
constexpr float kLeastNormal = 1.17549435e-38f;

enum Status : int32_t {
  kEmptyRow = 1,
  kNanSeen = 2,
  kZeroQ = 4,
  kBadQRow = 8,
  kPlaceholder = 16,
  kBadOffsets = 32,
};

enum FilterOrder : int32_t { kOrderHf = 0, kOrderVllm = 1, kOrderJoint = 2 };

// One request's parameters, made safe: a device value that the host could not check never divides by zero or loops.
struct Filter {
  float inv_temperature;
  float scale;    // log2(e) / T
  float top_p;    // >= 1: off
  float min_p;    // <= 0: off
  int64_t top_k;  // <= 0: off
  bool greedy;
};

SPECDEC_HD Filter make_filter(float temperature, float top_p, int32_t top_k, float min_p) {
  Filter f;
  f.greedy = !(temperature >= kGreedyBelow);
  const float t = f.greedy ? 1.0f : (temperature < 1e30f ? temperature : 1e30f);
  f.inv_temperature = 1.0f / t;
  f.scale = f.inv_temperature * kLog2e;
  f.top_p = top_p < 1.0f ? (top_p > 0.0f ? top_p : 0.0f) : 1.0f;
  // A ratio below the least normal float cannot be told from 0.
  f.min_p = min_p > 0.0f ? (min_p < 1.0f ? (min_p > kLeastNormal ? min_p : kLeastNormal) : 1.0f) : 0.0f;
  f.top_k = top_k;
  return f;
}

// p(x) = exp((z - row_max) / T - log_mass) for z >= cutoff, else 0; see specdec_kernels.Nucleus.
struct Nucleus {
  float cutoff, row_max, log_mass;
};

SPECDEC_HD Nucleus empty_nucleus() { return {kInf, -kInf, -kInf}; }

// (z - row_max) * scale in units of log2, 0 at the maximum (+inf included), -inf for z = -inf or NaN.
SPECDEC_HD float scaled(float z, float row_max, float scale) {
  if (z == row_max) return 0.0f;
  return z > -kInf ? (z - row_max) * scale : -kInf;
}

SPECDEC_HD float probability(float z, const Nucleus& n, float scale) {
  if (!(z >= n.cutoff) || n.row_max == -kInf) return 0.0f;
  return exp2_neg(scaled(z, n.row_max, scale) - n.log_mass * kLog2e);
}

}  // namespace specdec::SPECDEC_ISA
