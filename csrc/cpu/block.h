// Sums over a row: the mass of max(0, weight * p - q), an entropy, and what some tokens leave of a distribution.
#pragma once

#include "cpu/race.h"
#include "cpu/scratch.h"

namespace specdec::SPECDEC_ISA {

// The sum of term(v, n, p of ids v..v + n - 1) over the lanes where p has tokens: in float32 by lanes within a tile,
// tile after tile in double, so the same bits for any vector width. What a term reads besides p is read there only.
template <class Term>
double sum_over_nucleus(const Dist& p, int64_t vocab, const Term& term) {
  return with_row(*p.source.view, p.source.row, [&](const auto* row) {
    const bool filtered = p.kind == Kind::kLogits && !p.source.map;
    const LanesF zero(0.0f);
    double total = 0.0;
    for (int64_t tile = 0; tile < vocab; tile += kTile) {
      const int64_t end = vocab - tile < kTile ? vocab : tile + kTile;
      LanesF sum(0.0f);
      for (int64_t base = tile; base < end; base += kGroup) {
        const int64_t n = end - base < kGroup ? end - base : kGroup;
        if (filtered && !any_kept(row + base, n, p.nucleus.cutoff)) continue;
        for (int64_t i = 0; i < n; i += kLanes) {
          const LanesF mine = p.probs(base + i, n - i);
          if (any(mine > zero)) sum = sum + term(base + i, n - i, mine);
        }
      }
      total += horizontal_sum(sum);
    }
    return total;
  });
}

// Nothing but p's nucleus can have an excess.
inline float excess_mass(const Dist& p, const Dist& q, float weight, int64_t vocab) {
  const LanesF w(weight), zero(0.0f);
  return static_cast<float>(sum_over_nucleus(p, vocab, [&](int64_t v, int64_t n, const LanesF& mine) {
    const LanesF excess = w * mine - q.probs(v, n);
    return select(excess > zero, excess, zero);
  }));
}

// -sum p log p in nats; of probabilities that are none (a sum above 1) at least 0.
inline float entropy(const Dist& p, int64_t vocab) {
  const LanesF log_mass(p.kind == Kind::kLogits ? p.nucleus.log_mass : 0.0f), zero(0.0f);
  const double total = sum_over_nucleus(p, vocab, [&](int64_t v, int64_t n, const LanesF& mine) {
    return select(mine > zero, mine * (log_mass - p.log_weights(v, n)), zero);
  });
  return total > 0.0 ? static_cast<float>(total) : 0.0f;
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
