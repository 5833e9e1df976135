// The accept test of the token rule.
#pragma once

#include "core/config.h"

namespace specdec::SPECDEC_ISA {

// coin * q < p, strictly: p = 0 is never accepted, p >= q always. The caller has dealt with q(x) <= 0 and NaN.
SPECDEC_HD bool accepts(float coin, float p, float q) {
  if (!(p > 0.0f)) return false;
  return p >= q || coin * q < p;
}

}  // namespace specdec::SPECDEC_ISA
