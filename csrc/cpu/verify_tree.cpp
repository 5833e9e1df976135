// Launcher of verify_tree; the kernel is in verify_tree_kernel.h.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void verify_tree(Tensor target, bool target_is_probs, Tensor draft_tokens, Tensor parents, Tensor cu_num_draft,
                 Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, Tensor seed, MaybeTensor slots,
                 MaybeTensor position, MaybeTensor draft, bool draft_is_probs, MaybeTensor draft_rows,
                 MaybeTensor draft_cutoff, MaybeTensor draft_row_max, MaybeTensor draft_log_mass,
                 MaybeTensor draft_temperature, MaybeTensor draft_top_p, MaybeTensor draft_top_k,
                 MaybeTensor draft_min_p, MaybeTensor draft_slots, MaybeTensor target_to_draft, int64_t rule,
                 bool replacement, double bound, double factor, MaybeTensor rates, int64_t filter_order, Tensor tokens,
                 Tensor num_accepted, Tensor path, Tensor num_emitted, Tensor status, MaybeTensor logprobs,
                 MaybeTensor cutoff, MaybeTensor row_max, MaybeTensor log_mass) {
  constexpr const char* op = "verify_tree";
  VerifyTreeArgs a;
  fill_verify_args(op, a, target, target_is_probs, draft_tokens, cu_num_draft, temperature, top_p, top_k, min_p, seed,
                   slots, position, draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
                   draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots, target_to_draft, filter_order,
                   tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max, log_mass);
  a.rule = static_cast<int32_t>(rule);
  require(a.rule == kTargetOnly || a.rule >= kTypical || a.draft, op, "draft", "given for a rule that reads q");
  require(a.rule != kSynthetic || rates, op, "rates", "given for rule synthetic");
  a.parents = index_view(op, "parents", parents, 0);
  a.max_depth = tokens.size(1) - 1;
  a.replacement = replacement;
  a.bound = static_cast<float>(bound), a.factor = static_cast<float>(factor);
  a.rates = floats(op, "rates", rates, 0);
  a.num_rates = rates ? rates->numel() : 0;
  a.path = ints(op, "path", path, a.batch * a.max_depth);
  parallel_for_each(a.batch, a.target.rows * a.target.width, [&](int64_t b) { kernels().verify_tree(a, b); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree)); }
