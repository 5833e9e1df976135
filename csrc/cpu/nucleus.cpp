// Launcher of nucleus; the kernel is in nucleus_kernel.h.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void nucleus(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, MaybeTensor slots,
             MaybeTensor rows, int64_t filter_order, Tensor cutoff, Tensor row_max, Tensor log_mass, Tensor status) {
  constexpr const char* op = "nucleus";
  RowOpArgs a;
  a.logits = rows_view(op, "logits", logits);
  const int64_t n = a.logits.rows;
  a.params = params_view(op, temperature, top_p, top_k, min_p, slots, rows ? 1 : n);
  a.rows = index_view(op, "rows", rows, n);
  a.filter_order = static_cast<int32_t>(filter_order);
  a.nucleus = nucleus_view(op, cutoff, row_max, log_mass, n);
  a.status = ints(op, "status", status, n);
  parallel_for_each(n, n * a.logits.width, [&](int64_t i) { kernels().nucleus(a, i); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("nucleus", TORCH_BOX(&specdec::nucleus)); }
