// Launcher of filter_probs; the kernel is in filter_probs_kernel.h.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void filter_probs(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, MaybeTensor slots,
                  MaybeTensor rows, int64_t filter_order, Tensor probs, Tensor status) {
  constexpr const char* op = "filter_probs";
  RowOpArgs a;
  a.logits = rows_view(op, "logits", logits);
  const int64_t n = a.logits.rows;
  a.params = params_view(op, temperature, top_p, top_k, min_p, slots, rows ? 1 : n);
  a.rows = index_view(op, "rows", rows, n);
  a.filter_order = static_cast<int32_t>(filter_order);
  a.probs = floats(op, "probs", probs, n * a.logits.width);
  a.status = ints(op, "status", status, n);
  parallel_for_each(n, n * a.logits.width, [&](int64_t i) { kernels().filter_probs(a, i); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("filter_probs", TORCH_BOX(&specdec::filter_probs)); }
