// kv_rollback: shorter requests, and the pages that they no longer need.
#include "cpu/paged_cache.h"

namespace specdec {
namespace {

// Lets a request's hold of `page` go; returns status bits.
int32_t release(PagedCache& c, int64_t page) {
  if (!c.holds(page)) return kBadPage;
  if (c.ref_counts) {
    if (c.ref_counts[page] < 1) return kBadRefCount;
    if (--c.ref_counts[page] > 0) return 0;
  }
  if (c.top == c.pages) return kFreeListFull;
  c.free_pages[c.top++] = static_cast<int32_t>(page);
  return 0;
}

void kv_rollback(Tensor seq_lens, Tensor num_rejected, Tensor block_table, Tensor free_pages, Tensor num_free,
                 MaybeTensor ref_counts, int64_t page_size, Tensor status) {
  constexpr const char* op = "kv_rollback";
  PagedCache c = paged_cache(op, seq_lens, block_table, free_pages, num_free, ref_counts, page_size);
  const int32_t* rejected_of = ints(op, "num_rejected", num_rejected, c.batch);
  int32_t* out = ints(op, "status", status, c.batch);
  for (int64_t b = 0; b < c.batch; ++b) {
    out[b] = 0;
    const int64_t old = c.length(b), rejected = std::clamp<int64_t>(rejected_of[b], 0, old);
    if (rejected == 0) continue;
    c.seq_lens[b] = static_cast<int32_t>(old - rejected);
    const int64_t first = c.blocks(old - rejected);
    int64_t last = c.blocks(old);
    if (last > first && last > c.columns) out[b] = kBadPage;
    last = std::min(last, c.columns);
    while (last-- > first) {
      out[b] |= release(c, c.row(b)[last]);
      c.row(b)[last] = -1;
    }
  }
  *c.num_free = static_cast<int32_t>(c.top);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_rollback", TORCH_BOX(&specdec::kv_rollback)); }
