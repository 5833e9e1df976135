// Launcher of verify_chain; the kernel is in verify_chain_kernel.h.
#include <atomic>
#include <vector>

#include "cpu/chain.h"
#include "cpu/tensors.h"

namespace specdec {
namespace {

// Few requests on many threads: the target rows and the draft rows are looked at in parallel, first rows first; who
// finishes a row's second side decides it, and a row after a known rejection is skipped.
void verify_by_rows(const VerifyChainArgs& a) {
  const int64_t width = a.max_draft + 1;
  const bool scans_q = a.draft && !a.draft_is_probs && !a.draft_nucleus && a.rule != kRuleCoupled;
  const int64_t sides = scans_q ? 2 : 1, items = a.batch * width * sides;
  std::vector<RowDecision> decisions(a.batch * width);
  std::vector<std::atomic<int64_t>> done(a.batch * width);  // sides of each row that have been looked at
  std::vector<std::atomic<int64_t>> end(a.batch);           // rows from here on are not needed
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t count = chain_of(a, b).count;
    end[b] = count < 0 ? 0 : count + (a.emit_bonus ? 1 : 0);
  }
  parallel_for_each(items, items * a.target.width, [&](int64_t item) {
    const bool draft = item % sides != 0;
    const int64_t i = item / sides / a.batch, b = item / sides % a.batch;
    if (i >= end[b].load(std::memory_order_relaxed)) return;
    RowDecision& row = decisions[b * width + i];
    if (!draft) {
      kernels().look_at_target(a, b, i, row);
    } else if (i < chain_of(a, b).count) {
      kernels().look_at_draft(a, b, i, row);
    }
    if (done[b * width + i].fetch_add(1, std::memory_order_acq_rel) + 1 < sides) return;
    if (kernels().decide_row(a, b, i, row)) return;
    int64_t seen = end[b].load(std::memory_order_relaxed);
    while (i + 1 < seen && !end[b].compare_exchange_weak(seen, i + 1, std::memory_order_relaxed)) {
    }
  });
  parallel_for_each(a.batch, a.batch * a.target.width,
                    [&](int64_t b) { kernels().verify_finish(a, b, decisions.data() + b * width); });
}

void verify_chain(Tensor target, bool target_is_probs, Tensor draft_tokens, Tensor cu_num_draft, Tensor temperature,
                  Tensor top_p, Tensor top_k, Tensor min_p, Tensor seed, MaybeTensor slots, MaybeTensor position,
                  MaybeTensor draft, bool draft_is_probs, MaybeTensor draft_rows, MaybeTensor draft_cutoff,
                  MaybeTensor draft_row_max, MaybeTensor draft_log_mass, MaybeTensor draft_temperature,
                  MaybeTensor draft_top_p, MaybeTensor draft_top_k, MaybeTensor draft_min_p, MaybeTensor draft_slots,
                  MaybeTensor target_to_draft, int64_t rule, bool emit_bonus, int64_t filter_order, Tensor tokens,
                  Tensor num_accepted, Tensor num_emitted, Tensor status, MaybeTensor logprobs, MaybeTensor cutoff,
                  MaybeTensor row_max, MaybeTensor log_mass) {
  VerifyChainArgs a;
  fill_verify_args("verify_chain", a, target, target_is_probs, draft_tokens, cu_num_draft, temperature, top_p, top_k,
                   min_p, seed, slots, position, draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max,
                   draft_log_mass, draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
                   target_to_draft, filter_order, tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max,
                   log_mass);
  a.max_draft = tokens.size(1) - 1;
  a.rule = static_cast<int32_t>(rule);
  a.emit_bonus = emit_bonus;
  if (a.batch < 2 * static_cast<int64_t>(torch::stable::get_num_threads()) && a.max_draft > 0) {
    verify_by_rows(a);
  } else {
    parallel_for_each(a.batch, a.batch * (a.max_draft + 1) * a.target.width,
                      [&](int64_t b) { kernels().verify_request(a, b); });
  }
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain)); }
