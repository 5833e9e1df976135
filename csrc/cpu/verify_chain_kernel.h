// verify_chain: one request's drafts and target rows to its emitted tokens.
//
// The first rejection ends the request: rows behind it are not read by a thread that decides the request alone, and by
// several threads only until they know. A decided row costs one read of its target row and one of its draft row (a
// gather where q's nucleus was saved); the row that emits is read once more, from the cache when one thread decides.
#pragma once

#include "cpu/chain.h"
#include "cpu/verify.h"

namespace specdec::SPECDEC_ISA {

// Nucleus of draft i's row, computed or as saved, and whether the row can be used at all.
inline void look_at_draft(const VerifyChainArgs& a, int64_t b, int64_t i, RowDecision& d) {
  d.q_known = d.q_usable = true;
  if (!a.draft) return;
  const int64_t j = chain_of(a, b).start + i, row = draft_row(a, j), x = a.draft_tokens[j];
  // Neither is decided by q.
  if (x < 0 || x >= a.target.width || (!a.target_is_probs && filter_of(a.params, b).greedy)) return;
  d.q_usable = row >= 0;
  if (!d.q_usable || a.draft_is_probs) return;
  const Filter filter = filter_of(a.draft_params, b);
  if (filter.greedy) return;
  Nucleus n = empty_nucleus();
  d.q_usable = draft_nucleus(a, j, row, filter, n);
  pack(d.q, n);
}

inline void look_at_target(const VerifyChainArgs& a, int64_t b, int64_t i, RowDecision& d) {
  d.p_known = true;
  if (a.target_is_probs) return;
  pack(d.p, row_nucleus(a.target, chain_of(a, b).start + b + i, filter_of(a.params, b), a.filter_order, d.status));
}

// One-hot drafts have the same law under the token rule, which reads less.
inline bool by_block(const VerifyChainArgs& a, int64_t b) {
  if (a.rule != kRuleBlock || !a.draft || (!a.target_is_probs && filter_of(a.params, b).greedy)) return false;
  return a.draft_is_probs || !filter_of(a.draft_params, b).greedy;
}

// The token that row i emits of itself (argmax, race of p, or race of the residual). A row given as probabilities is
// looked at as a whole only here, so this is where its status bits come from.
inline int64_t row_token(const VerifyChainArgs& a, int64_t b, const Chain& chain, int64_t i, const Filter& filter,
                         const RowDecision& d, bool& found, int32_t& status) {
  const int64_t row = chain.start + b + i, vocab = a.target.width;
  const Dist p = target_dist(a, row, filter, unpack(d.p));
  if (a.target_is_probs) status |= drawn_status(a, row);
  if ((d.status | status) & kEmptyRow) {
    found = false;
    return 0;
  }
  if (filter.greedy && !a.target_is_probs) {
    found = true;
    return first_equal(p.source, vocab, d.p[1]);
  }
  const Dist q = d.from_residual ? draft_dist(a, b, chain.start + i, unpack(d.q)) : Dist{};
  const Winner winner = race_dist(p, d.from_residual ? &q : nullptr, d.weight, vocab, sample_key(a, b, i));
  found = winner.score > -kInf;
  return winner.token;
}

// Decides draft i, once its target row has been looked at (its draft row is looked at here if it has not been and is
// needed); at i = d there is nothing to decide. Returns whether the chain goes on.
inline bool decide_row(const VerifyChainArgs& a, int64_t b, int64_t i, RowDecision& d) {
  const Chain chain = chain_of(a, b);
  const Filter filter = filter_of(a.params, b);
  const int64_t row = chain.start + b + i, j = chain.start + i, vocab = a.target.width;
  if (i == chain.count || (d.status & kEmptyRow)) return false;

  const int64_t x = a.draft_tokens[j];
  if (x < 0 || x >= vocab) {
    d.status |= kPlaceholder;
    return false;
  }
  const Nucleus nucleus = unpack(d.p);
  const Dist p = target_dist(a, row, filter, nucleus);
  if (filter.greedy && !a.target_is_probs) {
    d.token = first_equal(p.source, vocab, nucleus.row_max);
    d.accepted = d.token == x;
    return d.accepted;
  }
  if (a.rule == kRuleCoupled) {
    bool found = false;
    int32_t status = 0;
    const int64_t token = row_token(a, b, chain, i, filter, d, found, status);
    d.status |= status;
    d.accepted = found && token == x;
    if (found) d.token = token;
    return d.accepted;
  }
  if (!d.q_known) look_at_draft(a, b, i, d);
  if (!d.q_usable) {
    d.status |= kBadQRow;
    return false;
  }
  const float q_x = draft_dist(a, b, j, unpack(d.q)).prob(x), p_x = p.prob(x);
  if (!(q_x - q_x == 0.0f)) {
    d.status |= kBadQRow;
    return false;
  }
  if (!(q_x > 0.0f)) {
    d.status |= kZeroQ;
    return false;
  }
  if (by_block(a, b)) {  // no weight grows from 0: what follows such a draft cannot stand
    d.tested = true, d.p_x = p_x, d.q_x = q_x;
    return p_x > 0.0f;
  }
  d.accepted = accepts(coin_of(a, b, i), p_x, q_x);
  d.from_residual = !d.accepted;
  return d.accepted;
}

// Block rule: how many drafts stand, from the probabilities of those that were looked at. The largest number wins, so
// the rows are tried from the back, and only those are summed whose coin may still say yes (h <= weight).
inline int64_t decide_block(const VerifyChainArgs& a, int64_t b, RowDecision* decisions) {
  const Chain chain = chain_of(a, b);
  int64_t n = 0;  // drafts whose weight is positive
  for (float weight = 1.0f; n < chain.count && decisions[n].tested; ++n) {
    RowDecision& d = decisions[n];
    d.weight = weight;
    weight = block_weight(weight, d.p_x, d.q_x);
    if (!(weight > 0.0f)) break;
    decisions[n + 1].weight = weight;
  }
  const auto stands = [&](int64_t i) {
    const RowDecision& d = decisions[i];
    if (d.weight >= 1.0f) return true;
    const float coin = coin_of(a, b, i - 1);
    if (!(coin < d.weight)) return false;
    if (!d.tested) return true;  // nothing is drafted behind it
    const Dist p = target_dist(a, chain.start + b + i, filter_of(a.params, b), unpack(d.p));
    const Dist q = draft_dist(a, b, chain.start + i, unpack(d.q));
    return block_accepts(coin, excess_mass(p, q, d.weight, a.target.width), d.weight);
  };
  while (n > 0 && !stands(n)) --n;
  for (int64_t i = 0; i < n; ++i) decisions[i].accepted = true;
  decisions[n].from_residual = decisions[n].tested;
  return n;
}

// Writes every output element of request b from the decisions of its rows 0..(first one not accepted).
inline void verify_finish(const VerifyChainArgs& a, int64_t b, RowDecision* decisions) {
  const Chain chain = chain_of(a, b);
  if (by_block(a, b) && chain.count >= 0) {
    const int64_t n = decide_block(a, b, decisions);
    if (!decisions[n].p_known) look_at_target(a, b, n, decisions[n]);
  }
  const Filter filter = filter_of(a.params, b);
  const int64_t width = a.max_draft + 1;
  int32_t status = chain.clamped ? kBadOffsets : 0;
  int64_t accepted = 0, emitted = 0;
  const auto emit = [&](int64_t i, int64_t token, float logprob, const Nucleus& nucleus) {
    a.tokens[b * width + i] = static_cast<int32_t>(token);
    if (a.logprobs) a.logprobs[b * width + i] = logprob;
    if (a.nucleus) write(a.nucleus, b * width + i, nucleus);
    ++emitted;
  };
  for (int64_t i = 0; i <= chain.count; ++i) {
    if (i == chain.count && !a.emit_bonus) break;
    const RowDecision& d = decisions[i];
    status |= d.status;
    bool found = true;
    int64_t token = d.accepted ? a.draft_tokens[chain.start + i] : d.token;
    if (token < 0) token = row_token(a, b, chain, i, filter, d, found, status);
    float logprob = -kInf;
    if (a.logprobs && found) {
      const Dist p = target_dist(a, chain.start + b + i, filter, unpack(d.p));
      logprob = filter.greedy && !a.target_is_probs ? 0.0f : p.log_prob(token);
    }
    emit(i, found ? token : 0, logprob, unpack(d.p));
    if (!d.accepted) break;
    ++accepted;
  }
  if (chain.count < 0) emit(0, 0, -kInf, empty_nucleus());
  a.num_accepted[b] = static_cast<int32_t>(accepted);
  a.num_emitted[b] = static_cast<int32_t>(emitted);
  a.status[b] = status;
  for (int64_t i = emitted; i < width; ++i) {
    a.tokens[b * width + i] = -1;
    if (a.logprobs) a.logprobs[b * width + i] = 0.0f;
    if (a.nucleus) write(a.nucleus, b * width + i, {0.0f, 0.0f, 0.0f});
  }
}

inline void verify_request(const VerifyChainArgs& a, int64_t b) {
  const Chain chain = chain_of(a, b);
  RowDecision* decisions = decision_scratch(chain.count + 1);
  for (int64_t i = 0; i <= chain.count; ++i) decisions[i] = RowDecision{};
  // The block rule knows at the end only whether it needs the bonus row.
  const int64_t rows = chain.count + (a.emit_bonus && !by_block(a, b) ? 1 : 0);
  for (int64_t i = 0; i < rows; ++i) {
    look_at_target(a, b, i, decisions[i]);
    if (!decide_row(a, b, i, decisions[i])) break;
  }
  verify_finish(a, b, decisions);
}

}  // namespace specdec::SPECDEC_ISA
