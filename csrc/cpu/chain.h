// Which rows and drafts a request of verify_chain owns, and what is decided about a row.
#pragma once

#include "cpu/args.h"

namespace specdec {

struct RowDecision {
  float p[3] = {}, q[3] = {};  // Nucleus of the target row and of the draft row
  int32_t status = 0;
  bool p_known = false, q_known = false, q_usable = false;
  bool accepted = false;
  bool from_residual = false;  // a rejected row that emits from max(0, weight * p - q) rather than from p
  float weight = 1.0f;
  // Block rule: whether the row's draft has probabilities, and which.
  bool tested = false;
  float p_x = 0.0f, q_x = 0.0f;
  int64_t token = -1;  // what a rejected row emits, where deciding has already found it
};

struct Chain {
  int64_t start = 0, count = 0;  // first draft; number of drafts, -1 if the request has not even one row
  bool clamped = false;          // the offsets or max_draft asked for something else
};

inline Chain chain_of(const VerifyChainArgs& a, int64_t b) {
  const int64_t first = a.cu_num_draft[b], past = a.cu_num_draft[b + 1], total = a.draft_tokens.size;
  Chain c;
  c.start = first < 0 ? 0 : (first > total ? total : first);
  const int64_t end = past < c.start ? c.start : (past > total ? total : past);
  c.count = end - c.start < a.max_draft ? end - c.start : a.max_draft;
  const int64_t last_row = a.target.rows - 1 - c.start - b;
  if (last_row < c.count) c.count = last_row;
  if (c.count < 0) c.count = -1;
  c.clamped = c.count < 0 || c.start != first || c.start + c.count != past;
  return c;
}

}  // namespace specdec
