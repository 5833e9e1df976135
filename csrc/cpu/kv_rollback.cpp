// kv_rollback: shorter requests, and the pages that they no longer need.
#include "cpu/paged_cache.h"

namespace specdec {
namespace {

// Whether a request of `length` tokens needs a block that was evicted. The blocks that are gone have no gap and begin
// where the sinks end, so the first one needed tells; python_ref/kv_rollback.py says why.
bool reaches_evicted(const PagedCache& c, int64_t r, int64_t length, int64_t window, int64_t sinks) {
  const int64_t reached = std::max(std::max<int64_t>(length - window + 1, 0) / c.page_size, c.blocks(sinks));
  return reached < c.blocks(length) && (reached >= c.columns || !c.holds(c.row(r)[reached]));
}

void kv_rollback(Tensor seq_lens, Tensor num_rejected, Tensor block_table, Tensor free_pages, Tensor num_free,
                 MaybeTensor ref_counts, MaybeTensor slots, int64_t page_size, int64_t null_page, int64_t window,
                 int64_t sinks, Tensor status) {
  constexpr const char* op = "kv_rollback";
  PagedCache c = paged_cache(op, seq_lens, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page);
  const int32_t* rejected_of = ints(op, "num_rejected", num_rejected, c.batch);
  require(window >= 0, op, "window", ">= 0");
  require(sinks >= 0, op, "sinks", ">= 0");
  int32_t* out = ints(op, "status", status, c.batch);
  for (int64_t b = 0; b < c.batch; ++b) {
    out[b] = 0;
    const int64_t r = c.row_of(b);
    if (r < 0) continue;
    const int64_t old = c.length(r), rejected = std::clamp<int64_t>(rejected_of[b], 0, old);
    if (rejected == 0) continue;
    if (window > 0 && reaches_evicted(c, r, old - rejected, window, sinks)) {
      out[b] = kEvicted;
      continue;
    }
    c.seq_lens[r] = static_cast<int32_t>(old - rejected);
    const int64_t first = c.blocks(old - rejected);
    int64_t last = c.blocks(old);
    if (last > first && last > c.columns) out[b] = kBadPage;
    last = std::min(last, c.columns);
    while (last-- > first) {
      int32_t& entry = c.row(r)[last];
      if (window > 0 && entry == null_page) continue;
      out[b] |= release(c, entry);
      entry = static_cast<int32_t>(null_page);
    }
  }
  *c.num_free = static_cast<int32_t>(c.top);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_rollback", TORCH_BOX(&specdec::kv_rollback)); }
