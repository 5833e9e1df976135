// sample: one row to one token, or to the first of a race. The row is read from memory once; the race reads it again
// from the cache, and makes noise only for groups of tokens that can still win.
#pragma once

#include "cpu/nucleus_kernel.h"
#include "cpu/race.h"

namespace specdec::SPECDEC_ISA {

// The largest logits in order, ties by the lower id: what sampling without replacement becomes as T goes to 0.
inline Winners largest(const Columns& source, int64_t vocab, Winners best) {
  for (int64_t v = 0; v < vocab; v += kLanes) {
    const int64_t n = vocab - v < kLanes ? vocab - v : kLanes;
    const LanesF z = source.lanes(v, n, -kInf);
    if (!any(z > LanesF(best.bound()))) continue;
    float x[kLanes];
    store(x, z);
    for (int64_t i = 0; i < n; ++i) best.meet(x[i] == x[i] ? x[i] : -kInf, v + i);
  }
  return best;
}

inline void sample(const RowOpArgs& a, int64_t row) {
  const int64_t request = request_of(a, row), k = a.num_samples;
  const Filter filter = filter_of(a.params, request);
  const int64_t vocab = a.target_to_draft ? a.target_to_draft.size : a.logits.width;
  int32_t status = 0;
  Dist p;
  p.source = {&a.logits, row, a.target_to_draft};
  p.filter = filter;
  p.nucleus = row_nucleus(a.logits, row, filter, a.filter_order, status);

  Winners best;
  best.wanted = static_cast<int>(k);
  if (!(status & kEmptyRow)) {
    const NoiseKey key = make_key(a.params.seed[a.params.slot(request)], a.position ? a.position[row] : 0, a.stream,
                                  a.ids ? a.ids[row] : 0);
    if (filter.greedy) {
      const int64_t first = first_equal(p.source, vocab, p.nucleus.row_max);
      if (first < vocab && k == 1) best.meet(0.0f, first);
      if (first < vocab && k > 1) best = largest(p.source, vocab, best);
    } else if (k == 1) {
      const Winner winner = race_dist(p, nullptr, 1.0f, vocab, key);
      best.meet(winner.score, winner.token);
    } else {
      best = race_several(p, vocab, key, best);
    }
  }
  if (!best.count) status |= kEmptyRow;
  for (int64_t i = 0; i < k; ++i) {
    const bool found = i < best.count;
    a.tokens[row * k + i] = found ? static_cast<int32_t>(best.token[i]) : (i ? -1 : 0);
    if (!a.logprobs) continue;
    float log_p = -kInf;
    if (found) log_p = filter.greedy ? (i ? -kInf : 0.0f) : p.log_prob(best.token[i]);
    a.logprobs[row * k + i] = log_p;
  }
  a.status[row] = status;
  if (a.nucleus) write(a.nucleus, row, p.nucleus);
}

}  // namespace specdec::SPECDEC_ISA
