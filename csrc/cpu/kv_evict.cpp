// kv_evict: pages that a sliding window has left, or that a budget drops.
#include "cpu/paged_cache.h"

namespace specdec {
namespace {

void kv_evict(Tensor seq_lens, int64_t keep_last, Tensor block_table, Tensor free_pages, Tensor num_free,
              MaybeTensor ref_counts, MaybeTensor slots, int64_t page_size, int64_t null_page, int64_t sinks,
              Tensor status) {
  constexpr const char* op = "kv_evict";
  PagedCache c = paged_cache(op, seq_lens, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page);
  require(keep_last >= 1, op, "keep_last", ">= 1");
  require(sinks >= 0, op, "sinks", ">= 0");
  int32_t* out = ints(op, "status", status, c.batch);
  const int64_t first = c.blocks(sinks);
  for (int64_t b = 0; b < c.batch; ++b) {
    out[b] = 0;
    const int64_t r = c.row_of(b);
    if (r < 0) continue;
    const int64_t end = std::max<int64_t>(c.length(r) - keep_last, 0) / c.page_size;
    out[b] = end > std::max(first, c.columns) ? kBadPage : 0;
    int32_t* row = c.row(r);
    // Before an entry without a page all was evicted earlier.
    for (int64_t block = std::min(end, c.columns); block-- > first && row[block] != null_page;) {
      out[b] |= release(c, row[block]);
      row[block] = static_cast<int32_t>(null_page);
    }
  }
  *c.num_free = static_cast<int32_t>(c.top);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_evict", TORCH_BOX(&specdec::kv_evict)); }
