// Sums over a row: the mass of max(0, weight * p - q), and what some tokens leave of a distribution.
#pragma once

#include "cpu/race.h"
#include "cpu/scratch.h"

namespace specdec::SPECDEC_ISA {

// In float32 by lanes within a tile, tile after tile in double: the same bits for any vector width. Nothing but p's
// nucleus can have an excess, so q is read there only.
inline float excess_mass(const Dist& p, const Dist& q, float weight, int64_t vocab) {
  return with_row(*p.source.view, p.source.row, [&](const auto* row) {
    const bool filtered = p.kind == Kind::kLogits && !p.source.map;
    const LanesF w(weight), zero(0.0f);
    double mass = 0.0;
    for (int64_t tile = 0; tile < vocab; tile += kTile) {
      const int64_t end = vocab - tile < kTile ? vocab : tile + kTile;
      LanesF sum(0.0f);
      for (int64_t base = tile; base < end; base += kGroup) {
        const int64_t n = end - base < kGroup ? end - base : kGroup;
        if (filtered && !any_kept(row + base, n, p.nucleus.cutoff)) continue;
        for (int64_t i = 0; i < n; i += kLanes) {
          const LanesF mine = w * p.probs(base + i, n - i);
          if (any(mine > zero)) sum = sum + larger(mine - q.probs(base + i, n - i), zero);
        }
      }
      mass += horizontal_sum(sum);
    }
    return static_cast<float>(mass);
  });
}

// The mass of `d` without the `excluded` tokens, in the same order of summation.
inline float mass_without(const Dist& d, int64_t vocab, Excluded excluded) {
  double mass = 0.0;
  int64_t at = 0;
  for (int64_t tile = 0; tile < vocab; tile += kTile) {
    const int64_t end = vocab - tile < kTile ? vocab : tile + kTile;
    LanesF sum(0.0f);
    for (int64_t base = tile; base < end; base += kLanes) {
      LanesF p = d.probs(base, end - base);
      if (at < excluded.count && excluded.tokens[at] < base + kLanes) {
        float x[kLanes];
        store(x, p);
        for (; at < excluded.count && excluded.tokens[at] < base + kLanes; ++at)
          if (excluded.tokens[at] >= base) x[excluded.tokens[at] - base] = 0.0f;
        p = load(x);
      }
      sum = sum + p;
    }
    mass += horizontal_sum(sum);
  }
  return static_cast<float>(mass);
}

}  // namespace specdec::SPECDEC_ISA
