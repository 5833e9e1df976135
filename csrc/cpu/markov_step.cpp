// Launcher of markov_step; its kernel is in markov_step_kernel.h, and its draw is sample's.
#include "cpu/tensors.h"

namespace specdec {
namespace {

void markov_step(Tensor base_logits, Tensor previous, Tensor w1, Tensor w2, Tensor temperature, Tensor top_p,
                 Tensor top_k, Tensor min_p, Tensor seed, MaybeTensor slots, MaybeTensor position, MaybeTensor rows,
                 MaybeTensor ids, MaybeTensor target_to_draft, int64_t stream, int64_t filter_order, Tensor logits,
                 Tensor tokens, Tensor status, MaybeTensor cutoff, MaybeTensor row_max, MaybeTensor log_mass) {
  constexpr const char* op = "markov_step";
  MarkovArgs m;
  m.base = rows_view(op, "base_logits", base_logits);
  m.w1 = rows_view(op, "w1", w1);
  m.w2 = rows_view(op, "w2", w2);
  m.logits = rows_view(op, "logits", logits);
  const int64_t n = m.base.rows, width = m.base.width, rank = m.w1.width;
  m.tokens = index_view(op, "tokens", previous, n);
  require(m.w1.rows >= 1, op, "w1", "of at least one row");
  require(m.w2.rows == width && m.w2.width == rank && m.w2.dtype == m.w1.dtype, op, "w2", "[Vd, r] of w1's dtype");
  require(m.logits.rows == n && m.logits.width == width && m.logits.dtype == m.base.dtype, op, "logits",
          "as base_logits");
  const RowOpArgs a = sample_args(op, m.logits, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids,
                                  target_to_draft, stream, filter_order, tokens, status, cutoff, row_max, log_mass);
  // All rows share a tile of w2, which is r times a row's size: that is what there is to read. The rows themselves are
  // read once more by the draw, from the cache.
  const int64_t tiles = (width + kMarkovTile - 1) / kMarkovTile;
  parallel_for_each(tiles, n * width * ((rank + 15) / 16), [&](int64_t t) { kernels().markov_logits(m, t); });
  parallel_for_each(n, n * width, [&](int64_t i) { kernels().sample(a, i); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("markov_step", TORCH_BOX(&specdec::markov_step)); }
