// Launcher of sample; the kernel is in sample_kernel.h.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, Tensor seed, MaybeTensor slots,
            MaybeTensor position, MaybeTensor rows, MaybeTensor ids, MaybeTensor target_to_draft, int64_t stream,
            int64_t filter_order, Tensor tokens, Tensor status, MaybeTensor logprobs, MaybeTensor cutoff,
            MaybeTensor row_max, MaybeTensor log_mass) {
  constexpr const char* op = "sample";
  RowOpArgs a;
  a.logits = rows_view(op, "logits", logits);
  const int64_t n = a.logits.rows;
  a.params = params_view(op, temperature, top_p, top_k, min_p, slots, rows ? 1 : n);
  a.params.seed = vector_data<int64_t>(op, "seed", seed, ScalarType::Long, a.params.size);
  a.position = vector_data<int64_t>(op, "position", position, ScalarType::Long, n);
  a.rows = index_view(op, "rows", rows, n);
  a.ids = index_view(op, "ids", ids, n);
  a.target_to_draft = index_view(op, "target_to_draft", target_to_draft, 1);
  a.stream = static_cast<uint32_t>(stream);
  a.filter_order = static_cast<int32_t>(filter_order);
  a.num_samples = tokens.dim() == 2 ? tokens.size(1) : 1;
  require(a.num_samples >= 1 && a.num_samples <= kMaxSamples, op, "tokens", "[N] or [N, num_samples <= 128]");
  a.tokens = ints(op, "tokens", tokens, n * a.num_samples);
  a.status = ints(op, "status", status, n);
  a.logprobs = floats(op, "logprobs", logprobs, n * a.num_samples);
  a.nucleus = nucleus_view(op, cutoff, row_max, log_mass, n);
  parallel_for_each(n, n * a.logits.width, [&](int64_t i) { kernels().sample(a, i); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("sample", TORCH_BOX(&specdec::sample)); }
