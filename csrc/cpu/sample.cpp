// Launcher of sample; the kernel is in sample_kernel.h.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, Tensor seed, MaybeTensor slots,
            MaybeTensor position, MaybeTensor rows, MaybeTensor ids, MaybeTensor target_to_draft, int64_t stream,
            int64_t filter_order, Tensor tokens, Tensor status, MaybeTensor logprobs, MaybeTensor cutoff,
            MaybeTensor row_max, MaybeTensor log_mass) {
  constexpr const char* op = "sample";
  RowOpArgs a =
      sample_args(op, rows_view(op, "logits", logits), temperature, top_p, top_k, min_p, seed, slots, position, rows,
                  ids, target_to_draft, stream, filter_order, tokens, status, cutoff, row_max, log_mass);
  const int64_t n = a.logits.rows;
  a.logprobs = floats(op, "logprobs", logprobs, n * a.num_samples);
  parallel_for_each(n, n * a.logits.width, [&](int64_t i) { kernels().sample(a, i); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("sample", TORCH_BOX(&specdec::sample)); }
