// sample: one row to one token. The row is read from memory once; the race reads it again from the cache, and makes
// noise only for groups of tokens that can still win.
#pragma once

#include "cpu/nucleus_kernel.h"
#include "cpu/race.h"

namespace specdec::SPECDEC_ISA {

inline void sample(const RowOpArgs& a, int64_t row) {
  const int64_t request = request_of(a, row);
  const Filter filter = filter_of(a.params, request);
  const int64_t vocab = a.target_to_draft ? a.target_to_draft.size : a.logits.width;
  int32_t status = 0;
  Dist p;
  p.source = {&a.logits, row, a.target_to_draft};
  p.filter = filter;
  p.nucleus = row_nucleus(a.logits, row, filter, a.filter_order, status);

  int64_t token = 0;
  bool found = false;
  if (!(status & kEmptyRow) && filter.greedy) {
    token = first_equal(p.source, vocab, p.nucleus.row_max);
    found = token < vocab;
  } else if (!(status & kEmptyRow)) {
    const NoiseKey key = make_key(a.params.seed[a.params.slot(request)], a.position ? a.position[row] : 0, a.stream,
                                  a.ids ? a.ids[row] : 0);
    const Winner winner = race_dist(p, nullptr, 1.0f, vocab, key);
    token = winner.token;
    found = winner.score > -kInf;
  }
  if (!found) token = 0, status |= kEmptyRow;
  a.tokens[row] = static_cast<int32_t>(token);
  a.status[row] = status;
  if (a.logprobs) a.logprobs[row] = !found ? -kInf : (filter.greedy ? 0.0f : p.log_prob(token));
  if (a.nucleus) write(a.nucleus, row, p.nucleus);
}

}  // namespace specdec::SPECDEC_ISA
