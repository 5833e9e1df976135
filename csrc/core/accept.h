// The accept tests of the token rule and of the block rule.
#pragma once

#include "core/config.h"

namespace specdec::SPECDEC_ISA {

// coin * q < p, strictly: p = 0 is never accepted, p >= q always. The caller has dealt with q(x) <= 0 and NaN.
SPECDEC_HD bool accepts(float coin, float p, float q) {
  if (!(p > 0.0f)) return false;
  return p >= q || coin * q < p;
}

// Running weight of the block rule behind a draft: min(1, weight * p / q), without overflow; q > 0. As a product it
// keeps float32's relative precision, which a sum of logarithms of this size would not.
SPECDEC_HD float block_weight(float weight, float p, float q) {
  const float r = weight * p;
  return r >= q ? 1.0f : r / q;
}

// Whether the drafts before a row stand, where max(0, weight * p - q) of that row sums up to `mass` and weight < 1.
SPECDEC_HD bool block_accepts(float coin, float mass, float weight) { return coin * (mass + (1.0f - weight)) < mass; }

}  // namespace specdec::SPECDEC_ISA
