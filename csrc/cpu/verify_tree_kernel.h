// verify_tree: one request's tree of drafts to the accepted path and the token behind it.
//
// What rejections leave of a row needs no row to be written: every stage turns r into (w r - q / s)+ / Z, and from
// r = p that always has the form (omega p - q)+ / mass with two numbers (a token that was taken from q has nothing
// left, as it was rejected). So a node costs one read of its rows, and one sum over p's nucleus for each rejected
// child.
#pragma once

#include "cpu/chain.h"
#include "cpu/verify.h"

namespace specdec::SPECDEC_ISA {

constexpr int kMaxNodes = 128;

// (omega p - q)+ / mass once something has been taken from p, before that p.
struct Remainder {
  bool taken = false;
  float omega = 1.0f, mass = 1.0f;

  float at(float p, float q) const {
    if (!taken) return p;
    const float r = omega * p - q;
    return r > 0.0f ? r / mass : 0.0f;
  }
};

class Tree {
 public:
  Tree(const VerifyTreeArgs& a, int64_t b) : a_(a), b_(b), filter_(filter_of(a.params, b)) {
    const int64_t first = a.cu_num_draft[b], past = a.cu_num_draft[b + 1];
    const int64_t total = a.draft_tokens.size < a.parents.size ? a.draft_tokens.size : a.parents.size;
    start_ = first < 0 ? 0 : (first > total ? total : first);
    const int64_t end = past < start_ ? start_ : (past > total ? total : past);
    int64_t count = end - start_ < kMaxNodes ? end - start_ : kMaxNodes;
    if (a.target.rows - 1 - start_ - b < count) count = a.target.rows - 1 - start_ - b;
    count_ = count < 0 ? -1 : static_cast<int>(count);
    bad_ = count_ < 0 || start_ != first || start_ + count_ != past;
    depth_[0] = 0, parent_[0] = -1;
    for (int n = 1; n <= count_; ++n) {
      const int64_t parent = a.parents[start_ + n - 1];
      const bool hangs = parent >= 0 && parent < n && depth_[parent] >= 0;
      const bool here = hangs && depth_[parent] < a.max_depth;
      bad_ |= parent >= n || parent < -1 || hangs != here;
      parent_[n] = here ? static_cast<int>(parent) : -1;
      depth_[n] = here ? depth_[parent] + 1 : -1;
    }
  }

  void run() {
    if (count_ >= 0) {
      if (a_.rule == kSynthetic) {
        walk_synthetic();
      } else if (greedy()) {
        walk_greedy();
      } else if (a_.rule == kTargetOnly || (a_.rule == kGreedyDraft && bad_)) {
        // Of a tree that is cut the drawn children may be missing; target_only is right for any.
        walk_target_only(kInf, 1.0f);
      } else if (a_.rule == kThreshold) {
        walk_target_only(a_.bound, a_.factor);
      } else if (a_.rule == kTypical) {
        walk_typical();
      } else if (a_.rule == kRecursive) {
        walk_recursive();
      } else if (a_.rule == kGreedyDraft) {
        walk_greedy_draft();
      } else {
        walk_traversal();
      }
    }
    write_outputs();
  }

 private:
  struct Row {
    bool seen = false, q_usable = false;
    int32_t status = 0;
    Nucleus p = {}, q = {};
    int first_child = 0;  // 0: none
    int drawn = 0;        // greedy_draft: the last child, 0 if it is a placeholder
  };

  // Tokens of some siblings, in ascending order.
  struct Taken {
    int32_t tokens[kMaxNodes];
    int64_t count = 0;

    bool has(int64_t token) const {
      for (int64_t i = 0; i < count; ++i)
        if (tokens[i] == token) return true;
      return false;
    }
    void add(int64_t token) {
      if (has(token)) return;
      int64_t i = count++;
      for (; i > 0 && tokens[i - 1] > token; --i) tokens[i] = tokens[i - 1];
      tokens[i] = static_cast<int32_t>(token);
    }
    Excluded excluded() const { return {tokens, count}; }
  };

  bool greedy() const { return filter_.greedy && !a_.target_is_probs; }
  int64_t token(int n) const { return a_.draft_tokens[start_ + n - 1]; }
  int64_t target_row(int n) const { return start_ + b_ + n; }
  float coin(int n) const { return coin_of(a_, b_, n - 1); }

  // The next child of n after node `after`, or 0. Children are tried in the order of their ids.
  int next_child(int n, int after) const {
    for (int c = (after > n ? after : n) + 1; c <= count_; ++c)
      if (parent_[c] == n) return c;
    return 0;
  }

  // Looks at a node's row and children, and at q where `needs_q`.
  Row& visit(int n, bool needs_q) {
    Row& row = rows_[n];
    if (row.seen) return row;
    row.seen = true;
    if (!a_.target_is_probs) row.p = row_nucleus(a_.target, target_row(n), filter_, a_.filter_order, row.status);
    for (int c = next_child(n, n); c; c = next_child(n, c)) {
      row.drawn = 0;
      if (row.status & kEmptyRow) {
        parent_[c] = -1;
      } else if (token(c) < 0 || token(c) >= a_.target.width) {
        row.status |= kPlaceholder;
        parent_[c] = -1;
      } else {
        row.drawn = c;
      }
    }
    row.first_child = next_child(n, n);
    if (!needs_q || !row.first_child || (a_.rule == kGreedyDraft && !row.drawn)) return row;
    // Siblings were drawn from one row: that of the first.
    const int64_t j = start_ + row.first_child - 1, at = draft_row(a_, j);
    row.q_usable = at >= 0;
    if (row.q_usable && a_.draft_is_probs) {
      const float q_x = draft_dist(a_, b_, j, row.q).prob(token(row.first_child));
      row.q_usable = q_x - q_x == 0.0f;
    } else if (row.q_usable) {
      const Filter filter = filter_of(a_.draft_params, b_);
      if (!filter.greedy) row.q_usable = draft_nucleus(a_, j, at, filter, row.q);
    }
    if (!row.q_usable) row.status |= kBadQRow;
    return row;
  }

  Dist p_of(int n) const { return target_dist(a_, target_row(n), filter_, rows_[n].p); }
  Dist q_of(int n) const { return draft_dist(a_, b_, start_ + rows_[n].first_child - 1, rows_[n].q); }
  static float positive(float q) { return q > 0.0f ? q : 0.0f; }

  // What the taken tokens leave of q's mass. By difference it keeps a relative precision of 2^-19 down to 1/16, if all
  // of q's mass is on target ids.
  float rest(const Dist& q, const Taken& taken) const {
    if (!taken.count) return 1.0f;
    float s = 1.0f;
    for (int64_t i = 0; i < taken.count; ++i) s -= positive(q.prob(taken.tokens[i]));
    const bool all_on_ids = q.kind == Kind::kLogits && !a_.target_to_draft && a_.draft.width <= a_.target.width;
    return !all_on_ids || s < 0.0625f ? mass_without(q, a_.target.width, taken.excluded()) : s;
  }

  // After a child drawn from q / s was rejected at a node of weight w.
  void reject(const Dist& p, const Dist& q, float s, Remainder& left, float& w) const {
    // s, omega and mass may all be tiny, so that the product of two of them would be 0: quotients first.
    const float ws = w * s, stage = left.taken ? ws + left.mass : 1.0f;
    const float omega = left.taken ? ws / stage * left.omega : ws;
    const float excess = excess_mass(p, q, omega, a_.target.width);
    if (!(excess > 0.0f)) {
      if (w < 1.0f) w = 0.0f;
      return;
    }
    if (w < 1.0f) {
      const float z = (left.taken ? stage / left.mass : 1.0f) * (excess / s);
      w = z / (z + (1.0f - w));
    }
    left = {true, omega, excess};
  }

  void finish(int n, const Remainder& left, const Taken* without = nullptr) {
    node_ = n;
    Row& row = rows_[n];
    if (a_.target_is_probs) row.status |= drawn_status(a_, target_row(n));
    if (row.status & kEmptyRow) return;
    if (greedy()) {
      found_ = true, token_ = argmax(n);
      return;
    }
    const Dist p = p_of(n), q = left.taken ? q_of(n) : Dist{};
    const Winner winner = race_dist(p, left.taken ? &q : nullptr, left.omega, a_.target.width,
                                    sample_key(a_, b_, depth_[n]), without ? without->excluded() : Excluded{});
    found_ = winner.score > -kInf;
    token_ = found_ ? winner.token : 0;
  }

  // The lowest id of a greedy row's maximum.
  int64_t argmax(int n) const { return first_equal(p_of(n).source, a_.target.width, rows_[n].p.row_max); }

  void walk_greedy() {
    for (int n = 0;;) {
      const Row& row = visit(n, false);
      node_ = n;
      found_ = !(row.status & kEmptyRow);
      if (!found_) return;
      token_ = argmax(n);
      int child = row.first_child;
      while (child && token(child) != token_) child = next_child(n, child);
      if (!child) return;
      n = child;
    }
  }

  // The first of the children whose running sum of what is left of p passes the coin, or which has `enough` of it
  // alone, or 0; a token counts once. Children behind node `last` are left out; scale * p / mass is what is left of p
  // at the others' tokens.
  int pick(int n, int last, float u, float scale, float mass, Taken& seen, float enough = kInf) const {
    const Dist p = p_of(n);
    float total = 0.0f;
    for (int c = rows_[n].first_child; c && c <= last; c = next_child(n, c)) {
      if (seen.has(token(c))) continue;
      seen.add(token(c));
      const float share = scale * positive(p.prob(token(c))) / mass;
      total += share;
      if (u < total || share >= enough) return c;
    }
    return 0;
  }

  // The coin is the parent's: a node's number is the offset of the first draft of a chain behind it.
  void walk_target_only(float single, float factor) {
    for (int n = 0;;) {
      const Row& row = visit(n, false);
      Taken seen;
      const int child = row.first_child ? pick(n, count_, coin_of(a_, b_, n) * factor, 1.0f, 1.0f, seen, single) : 0;
      if (!child) return finish(n, {}, &seen);
      n = child;
    }
  }

  void walk_synthetic() {
    for (int n = 0;;) {
      const int child = visit(n, false).first_child, depth = depth_[n];
      // A coin is in (0, 1): a rate of NaN or below 0 accepts nothing, one above 1 everything.
      if (!child || depth >= a_.num_rates || !(coin_of(a_, b_, n) < a_.rates[depth])) return finish(n, {});
      n = child;
    }
  }

  // What a child's probability has to exceed; one up to the least normal number is none.
  float typical_bound(int n) const {
    const float by_entropy = a_.factor * exp2_neg(0.0f - entropy(p_of(n), a_.target.width) * kLog2e);
    const float bound = by_entropy < a_.bound ? by_entropy : a_.bound;
    return bound > kLeastNormal ? bound : kLeastNormal;
  }

  // A node comes after its parent, so one pass sees every parent decided.
  void walk_typical() {
    bool accepted[kMaxNodes + 1] = {true};
    float bound[kMaxNodes + 1];
    double log_p[kMaxNodes + 1] = {};  // of the path
    int best = 0;
    for (int c = 1; c <= count_; ++c) {
      const int n = parent_[c];
      if (n < 0 || !accepted[n]) continue;
      if (!rows_[n].seen && visit(n, false).first_child) bound[n] = typical_bound(n);
      if (parent_[c] < 0) continue;  // its parent's row is empty, or it is a placeholder
      const Dist p = p_of(n);
      if (!(p.prob(token(c)) > bound[n])) continue;
      accepted[c] = true;
      log_p[c] = log_p[n] + p.log_prob(token(c));
      if (depth_[c] > depth_[best] || (depth_[c] == depth_[best] && log_p[c] > log_p[best])) best = c;
    }
    visit(best, false);
    finish(best, {});
  }

  void walk_recursive() {
    for (int n = 0;;) {
      Row& row = visit(n, true);
      Remainder left;
      Taken taken;
      int child = row.q_usable ? row.first_child : 0;
      if (child) {
        const Dist p = p_of(n), q = q_of(n);
        float w = 1.0f;
        for (; child; child = next_child(n, child)) {
          const int64_t x = token(child);
          const float s = rest(q, taken), q_x = taken.has(x) ? 0.0f : q.prob(x);
          if (!(q_x > 0.0f)) {  // it was not drawn from q, and what is left of p is right whatever it was
            row.status |= kZeroQ;
            child = 0;
            break;
          }
          if (accepts(coin(child), left.at(p.prob(x), q_x), q_x / s)) break;
          reject(p, q, s, left, w);
          if (!a_.replacement) taken.add(x);
        }
      }
      if (!child) return finish(n, left);
      n = child;
    }
  }

  void walk_greedy_draft() {
    for (int n = 0;;) {
      Row& row = visit(n, true);
      Remainder left;
      Taken fixed;
      int child = 0;
      const int drawn = row.drawn;
      if (!drawn && row.first_child) {
        child = pick(n, count_, coin(row.first_child), 1.0f, 1.0f, fixed);
      } else if (row.q_usable) {
        const Dist p = p_of(n), q = q_of(n);
        for (int c = row.first_child; c != drawn; c = next_child(n, c)) fixed.add(token(c));
        const int64_t x = token(drawn);
        const float s = rest(q, fixed), q_x = fixed.has(x) ? 0.0f : q.prob(x);
        if (!(q_x > 0.0f)) {
          row.status |= kZeroQ;
          return finish(n, left);
        }
        if (accepts(coin(drawn), p.prob(x), q_x / s)) {
          child = drawn;
        } else {
          // The siblings are no candidates of this q, so all of their p is left.
          double excess = excess_mass(p, q, s, a_.target.width);
          for (int64_t i = 0; i < fixed.count; ++i) {
            const float kept = s * positive(p.prob(fixed.tokens[i])), r = kept - positive(q.prob(fixed.tokens[i]));
            excess += kept - (r > 0.0f ? r : 0.0f);
          }
          if (excess > 0.0) left = {true, s, static_cast<float>(excess)};
          if (drawn != row.first_child) {
            Taken seen;
            const float scale = left.taken ? s : 1.0f;
            child = pick(n, drawn - 1, coin(row.first_child), scale, left.mass, seen);
          }
        }
      }
      if (!child) return finish(n, left, &fixed);
      n = child;
    }
  }

  // Leaf to root, depth first; a node is tested when its children are used up.
  void walk_traversal() {
    struct Frame {
      int node, child;
      bool ended;
      float w;
      Remainder left;
    };
    Frame stack[kMaxNodes + 1];
    int top = 0;
    stack[0] = {0, 0, false, 1.0f, {}};
    for (;;) {
      Frame& f = stack[top];
      Row& row = visit(f.node, true);
      const int child = row.q_usable && !f.ended ? next_child(f.node, f.child) : 0;
      if (child) {
        f.child = child;
        const Dist p = p_of(f.node), q = q_of(f.node);
        const int64_t x = token(child);
        const Taken taken = tried(f.node, child);
        const float s = rest(q, taken), q_x = taken.has(x) ? 0.0f : q.prob(x);
        if (!(q_x > 0.0f)) {
          row.status |= kZeroQ;
          f.ended = true;
          continue;
        }
        const float w = block_weight(f.w, f.left.at(p.prob(x), q_x), q_x / s);
        if (w > 0.0f) {
          stack[++top] = {child, 0, false, w, {}};
          continue;
        }
        reject(p, q, s, f.left, f.w);
      } else if (top == 0 || f.w >= 1.0f || coin(f.node) < f.w) {
        return finish(f.node, f.left);
      } else {
        f.w = 0.0f;
      }
      // A node without weight is rejected, whatever hangs from it.
      while (stack[top].w == 0.0f) {
        Frame& parent = stack[--top];
        const Dist q = q_of(parent.node);
        reject(p_of(parent.node), q, rest(q, tried(parent.node, parent.child)), parent.left, parent.w);
      }
    }
  }

  // What the children of n before `child` took from q.
  Taken tried(int n, int child) const {
    Taken taken;
    if (!a_.replacement)
      for (int c = rows_[n].first_child; c && c != child; c = next_child(n, c)) taken.add(token(c));
    return taken;
  }

  void write_outputs() const {
    const int64_t K = a_.max_depth, width = K + 1;
    int32_t status = bad_ ? kBadOffsets : 0;
    int32_t path[kMaxNodes + 1];  // from the root
    const int accepted = count_ < 0 ? 0 : depth_[node_];
    for (int n = node_, i = accepted; count_ >= 0 && i >= 0; --i) path[i] = n, n = parent_[n];
    for (int i = 0; i <= accepted; ++i) {
      const int64_t out = b_ * width + i, emitted = i < accepted ? token(path[i + 1]) : token_;
      const bool known = count_ >= 0 && (i < accepted || found_);
      const Nucleus nucleus = count_ < 0 ? empty_nucleus() : rows_[path[i]].p;
      a_.tokens[out] = known ? static_cast<int32_t>(emitted) : 0;
      if (a_.logprobs) {
        float log_p = -kInf;
        // A greedy request accepts the argmax only, unless nobody looks at p.
        if (known && !greedy()) log_p = p_of(path[i]).log_prob(emitted);
        if (known && greedy()) log_p = a_.rule != kSynthetic || emitted == argmax(path[i]) ? 0.0f : -kInf;
        a_.logprobs[out] = log_p;
      }
      if (a_.nucleus) write(a_.nucleus, out, nucleus);
      if (i > 0) a_.path[b_ * K + i - 1] = path[i];
      if (count_ >= 0) status |= rows_[path[i]].status;
    }
    for (int64_t i = accepted + 1; i < width; ++i) {
      a_.tokens[b_ * width + i] = -1;
      a_.path[b_ * K + i - 1] = -1;
      if (a_.logprobs) a_.logprobs[b_ * width + i] = 0.0f;
      if (a_.nucleus) write(a_.nucleus, b_ * width + i, {0.0f, 0.0f, 0.0f});
    }
    a_.num_accepted[b_] = accepted;
    a_.num_emitted[b_] = accepted + 1;
    a_.status[b_] = status;
  }

  const VerifyTreeArgs& a_;
  const int64_t b_;
  const Filter filter_;
  int64_t start_;
  int count_;  // nodes but the root; -1 if the request has not even one row
  bool bad_;
  int parent_[kMaxNodes + 1], depth_[kMaxNodes + 1];  // -1: not there
  Row rows_[kMaxNodes + 1];
  int node_ = 0;  // where the walk ended
  int64_t token_ = 0;
  bool found_ = false;
};

inline void verify_tree(const VerifyTreeArgs& a, int64_t b) { Tree(a, b).run(); }

}  // namespace specdec::SPECDEC_ISA
