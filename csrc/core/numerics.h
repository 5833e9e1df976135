// exp2, log and log1p for float32, by the same operations in every backend: no fused multiply-add, no library calls.
// F is float, or a bundle of lanes with the same operators; I is its integer twin. Each needs, found by
// argument-dependent lookup or in this namespace: select(mask, F, F), larger(F, F) (the second where the first is NaN),
// as_int(F), as_float(I), shift_left(I, n), shift_right(I, n), to_float(I).
#pragma once

#include <cstring>

#include "core/config.h"

namespace specdec::SPECDEC_ISA {

SPECDEC_HD float select(bool mask, float a, float b) { return mask ? a : b; }
SPECDEC_HD float larger(float a, float b) { return a > b ? a : b; }
SPECDEC_HD int32_t as_int(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof i);
  return i;
}
SPECDEC_HD float as_float(int32_t i) {
  float x;
  std::memcpy(&x, &i, sizeof x);
  return x;
}
SPECDEC_HD int32_t shift_left(int32_t i, int n) { return static_cast<int32_t>(static_cast<uint32_t>(i) << n); }
SPECDEC_HD int32_t shift_right(int32_t i, int n) { return i >> n; }
SPECDEC_HD float to_float(int32_t i) { return static_cast<float>(i); }

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kExp2Min = -126.0f;

// 2^t for t <= 0, not below 2^-126 (-inf and NaN included): for sums in which such terms do not count.
// Degree-5 minimax polynomial of 2^f on [-1/2, 1/2], relative error 9.2e-8 before rounding, 2e-7 with it.
template <class F>
SPECDEC_HD F exp2_floor(F t) {
  t = larger(t, F(kExp2Min));
  const F shifted = t + F(12582912.0f);  // 1.5 * 2^23: the low mantissa bits now hold round(t)
  const F f = t - (shifted - F(12582912.0f));
  F y = F(0.00132647273f);
  y = y * f + F(0.00967151299f);
  y = y * f + F(0.0555073358f);
  y = y * f + F(0.240222424f);
  y = y * f + F(0.693147004f);
  y = y * f + F(1.0f);
  return as_float(as_int(y) + shift_left(as_int(shifted), 23));
}

// 2^t for t <= 0, and 0 below 2^-126. A t that rounding (or a Nucleus that does not belong to the row) leaves above 0
// is taken as at most 1, so that the result is a finite number whatever comes in.
template <class F>
SPECDEC_HD F exp2_neg(F t) {
  t = select(t > F(1.0f), F(1.0f), t);
  return select(t > F(kExp2Min), exp2_floor(t), F(0.0f));
}

// e * ln 2 + log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)): 2 atanh(f / (2 + f)) by its series, next term below 4e-9.
template <class F>
SPECDEC_HD F log_parts(F f, F e) {
  const F s = f / (F(2.0f) + f);
  const F s2 = s * s;
  F r = F(0.22222222222f);
  r = r * s2 + F(0.28571428571f);
  r = r * s2 + F(0.4f);
  r = r * s2 + F(0.66666666667f);
  const F tail = s * s2 * r + e * F(9.0580006145e-6f);
  return e * F(0.693138122559f) + (s + s + tail);  // ln 2 split so that e * high is exact
}

constexpr int32_t kSqrtHalfBits = 0x3f3504f3;

// log x for normal positive x.
template <class F>
SPECDEC_HD F log_pos(F x) {
  const auto i = as_int(x);
  const auto e = shift_right(i - kSqrtHalfBits, 23);
  return log_parts(as_float(i - shift_left(e, 23)) - F(1.0f), to_float(e));
}

// -log1p(-u) for u in [2^-33, 1 - 2^-24]: a standard exponential. Where 1 - u needs no scaling, u itself is the
// mantissa's distance from 1, which keeps small u exact.
template <class F>
SPECDEC_HD F exponential(F u) {
  const F w = F(1.0f) - u;
  const auto i = as_int(w);
  const auto e = shift_right(i - kSqrtHalfBits, 23);
  const F scaled = as_float(i - shift_left(e, 23)) - F(1.0f);
  const F exponent = to_float(e);
  return F(0.0f) - log_parts(select(exponent == F(0.0f), F(0.0f) - u, scaled), exponent);
}

}  // namespace specdec::SPECDEC_ISA
