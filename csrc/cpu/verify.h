// What verification asks of a target row, of a draft row and of the random numbers.
#pragma once

#include "core/accept.h"
#include "cpu/block.h"
#include "cpu/nucleus_kernel.h"
#include "cpu/race.h"

namespace specdec::SPECDEC_ISA {

inline Nucleus unpack(const float n[3]) { return {n[0], n[1], n[2]}; }
inline void pack(float out[3], const Nucleus& n) { out[0] = n.cutoff, out[1] = n.row_max, out[2] = n.log_mass; }

inline Dist target_dist(const VerifyArgs& a, int64_t row, const Filter& filter, const Nucleus& nucleus) {
  Dist p;
  p.kind = a.target_is_probs ? Kind::kProbs : Kind::kLogits;
  p.source = {&a.target, row, {}};
  p.filter = filter;
  p.nucleus = nucleus;
  return p;
}

// Row of the draft matrix behind draft j, or -1.
inline int64_t draft_row(const VerifyArgs& a, int64_t j) {
  const int64_t row = !a.draft_rows ? j : (j < a.draft_rows.size ? a.draft_rows[j] : -1);
  return row >= 0 && row < a.draft.rows ? row : -1;
}

inline Dist draft_dist(const VerifyArgs& a, int64_t b, int64_t j, const Nucleus& nucleus) {
  Dist q;
  q.token = a.draft_tokens[j];
  if (!a.draft) {
    q.kind = Kind::kOneHot;
    return q;
  }
  q.source = {&a.draft, draft_row(a, j), a.target_to_draft};
  if (a.draft_is_probs) {
    q.kind = Kind::kProbs;
    return q;
  }
  q.filter = filter_of(a.draft_params, b);
  q.nucleus = nucleus;
  if (q.filter.greedy) q.kind = Kind::kOneHot;
  return q;
}

// Nucleus of draft j's row, computed or as saved; whether the row can be used.
inline bool draft_nucleus(const VerifyArgs& a, int64_t j, int64_t row, const Filter& filter, Nucleus& n) {
  if (a.draft_nucleus) {
    if (j >= a.draft_nucleus.size) return false;
    n = {a.draft_nucleus.cutoff[j], a.draft_nucleus.row_max[j], a.draft_nucleus.log_mass[j]};
    return n.cutoff == n.cutoff && n.row_max > -kInf && n.log_mass - n.log_mass == 0.0f;
  }
  int32_t status = 0;
  n = row_nucleus(a.draft, row, filter, a.filter_order, status);
  return status == 0;
}

// Status bits of a row of probabilities, which is looked at as a whole only where a token is drawn from it.
inline int32_t drawn_status(const VerifyArgs& a, int64_t row) {
  const int64_t vocab = a.target.width;
  const auto* z = static_cast<const float*>(a.target.data) + row * a.target.stride;
  const RowStats stats = scan_row(z, vocab, 0.0f, /*with_mass=*/false, /*top_p=*/1.0f, thread_scratch(vocab));
  return (stats.nan_seen ? kNanSeen : 0) | (stats.row_max > 0.0f ? 0 : kEmptyRow);
}

inline NoiseKey sample_key(const VerifyArgs& a, int64_t b, int64_t i) {
  const int64_t anchor = a.position ? a.position[b] : 0;
  return make_key(a.params.seed[a.params.slot(b)], static_cast<int64_t>(static_cast<uint64_t>(anchor) + i),
                  kStreamSample, 0);
}

inline float coin_of(const VerifyArgs& a, int64_t b, int64_t i) {
  return accept_coin(a.params.seed[a.params.slot(b)], a.position ? a.position[b] : 0, i);
}

}  // namespace specdec::SPECDEC_ISA
