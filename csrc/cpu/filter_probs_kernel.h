// filter_probs: one row to its renormalised probabilities.
#pragma once

#include "cpu/nucleus_kernel.h"

namespace specdec::SPECDEC_ISA {

inline void filter_probs(const RowOpArgs& a, int64_t row) {
  const Filter filter = filter_of(a.params, request_of(a, row));
  const int64_t vocab = a.logits.width;
  int32_t status = 0;
  Dist p;
  p.source = {&a.logits, row, {}};
  p.filter = filter;
  p.nucleus = row_nucleus(a.logits, row, filter, a.filter_order, status);
  if (filter.greedy && !(status & kEmptyRow)) {
    p.kind = Kind::kOneHot;
    p.token = first_equal(p.source, vocab, p.nucleus.row_max);
  }
  float* out = a.probs + row * vocab;
  for (int64_t v = 0; v < vocab; v += kLanes) {
    const int64_t n = vocab - v < kLanes ? vocab - v : kLanes;
    const LanesF x = p.probs(v, n);
    if (n == kLanes)
      store(out + v, x);
    else
      std::memcpy(out + v, &x, n * sizeof(float));
  }
  a.status[row] = status;
}

}  // namespace specdec::SPECDEC_ISA
