// kv_scrub: pages that went back to the free list, and what is behind the new end of a request's last page, become
// zero.
#include <algorithm>
#include <cstring>

#include "cpu/pages.h"

namespace specdec {
namespace {

struct Place {
  int64_t page, first;  // tokens `first` and up
};

void kv_scrub(Tensors caches, Tensor free_pages, Tensor before, Tensor num_free, MaybeTensor seq_lens,
              MaybeTensor num_rejected, MaybeTensor block_table, MaybeTensor ref_counts, MaybeTensor slots,
              int64_t null_page) {
  constexpr const char* op = "kv_scrub";
  const PagedCaches c = paged_caches(op, caches);
  const int64_t P = free_pages.numel();
  const int32_t* list = ints(op, "free_pages", free_pages, P);
  require(c.pages >= P, op, "caches", "of a page for each entry of the free list");
  require(c.page_size >= 1, op, "caches", "of at least one token a page");
  std::vector<Place> places;
  const auto holds = [&](int64_t page) { return page >= 0 && page < P && page != null_page; };
  const int64_t last = std::clamp<int64_t>(*ints(op, "num_free", num_free, 1), 0, P);
  for (int64_t i = std::clamp<int64_t>(*ints(op, "before", before, 1), 0, P); i < last; ++i)
    if (holds(list[i])) places.push_back({list[i], 0});

  if (block_table) {
    require(seq_lens && num_rejected, op, "seq_lens and num_rejected", "given with block_table");
    require(block_table->dim() == 2 && block_table->scalar_type() == ScalarType::Int &&
                (block_table->size(1) <= 1 || block_table->stride(1) == 1),
            op, "block_table", "int32 [B, M], contiguous in its last dimension");
    const int64_t rows = block_table->size(0), batch = slots ? slots->numel() : rows, columns = block_table->size(1);
    const auto* table = static_cast<const int32_t*>(block_table->const_data_ptr());
    const int32_t* lengths = ints(op, "seq_lens", *seq_lens, rows);
    const int32_t* rejected = ints(op, "num_rejected", *num_rejected, batch);
    const int32_t* counts = vector_data<int32_t>(op, "ref_counts", ref_counts, ScalarType::Int, P);
    const IndexView row_of = index_view(op, "slots", slots, batch);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t r = row_of ? row_of[b] : b;
      if (r < 0 || r >= rows) continue;
      const int64_t block = lengths[r] / c.page_size, first = lengths[r] % c.page_size;
      if (rejected[b] <= 0 || lengths[r] <= 0 || first == 0 || block >= columns) continue;
      const int64_t page = table[r * block_table->stride(0) + block];
      if (holds(page) && (!counts || counts[page] <= 1)) places.push_back({page, first});
    }
  }
  const auto count = static_cast<int64_t>(places.size()), total = static_cast<int64_t>(c.data.size()) * count;
  parallel_for_each(total, total * c.size() / 4, [&](int64_t item) {
    const Place place = places[item % count];
    char* page = c.data[item / count] + place.page * c.page_bytes;
    c.runs(place.first, [&](int64_t at, int64_t bytes) { std::memset(page + at, 0, bytes); });
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_scrub", TORCH_BOX(&specdec::kv_scrub)); }
