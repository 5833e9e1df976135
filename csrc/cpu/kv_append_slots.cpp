// kv_append_slots: where each request's next tokens go, and the pages for them.
#include <limits>
#include <vector>

#include "cpu/paged_cache.h"

namespace specdec {
namespace {

struct Copy {
  int32_t source = -1, destination = -1;
};

// Gives the request at row r the pages that its tokens old .. last - 1 need, or none; returns status bits.
int32_t reserve(PagedCache& c, int64_t r, int64_t old, int64_t last, std::vector<int64_t>& fresh, Copy& copy) {
  if (last > std::min<int64_t>(c.columns * c.page_size, std::numeric_limits<int32_t>::max())) return kTableFull;
  int32_t* row = c.row(r);
  const bool partial = old % c.page_size != 0;
  const int64_t first = old / c.page_size;
  if (partial && !c.holds(row[first])) return kBadPage;
  fresh.clear();  // blocks that need a page from the free list
  for (int64_t block = first; block < c.blocks(last); ++block)
    if (!c.holds(row[block]) || (c.ref_counts && c.ref_counts[row[block]] > 1)) fresh.push_back(block);
  const int64_t needed = static_cast<int64_t>(fresh.size());
  if (needed > c.top) return kOutOfPages;
  for (int64_t i = 1; i <= needed; ++i)
    if (!c.holds(c.free_pages[c.top - i])) return kBadPage;
  for (const int64_t block : fresh) {
    const int32_t before = row[block], page = c.free_pages[--c.top];
    row[block] = page;
    if (c.ref_counts) {
      if (c.holds(before)) --c.ref_counts[before];
      c.ref_counts[page] = 1;
    }
    if (partial && block == first) copy = {before, page};
  }
  return 0;
}

void kv_append_slots(Tensor seq_lens, Tensor num_new, Tensor block_table, Tensor free_pages, Tensor num_free,
                     MaybeTensor ref_counts, MaybeTensor slots, int64_t page_size, int64_t null_page,
                     Tensor token_slots, Tensor copy_src, Tensor copy_dst, Tensor status) {
  constexpr const char* op = "kv_append_slots";
  PagedCache c = paged_cache(op, seq_lens, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page);
  require(token_slots.dim() == 2 && token_slots.size(0) == c.batch, op, "token_slots", "[B, max_new]");
  const int64_t max_new = token_slots.size(1);
  const int32_t* new_of = ints(op, "num_new", num_new, c.batch);
  auto* slot = vector_data<int64_t>(op, "token_slots", token_slots, ScalarType::Long, c.batch * max_new);
  int32_t* sources = ints(op, "copy_src", copy_src, c.batch);
  int32_t* destinations = ints(op, "copy_dst", copy_dst, c.batch);
  int32_t* out = ints(op, "status", status, c.batch);
  std::vector<int64_t> fresh;
  for (int64_t b = 0; b < c.batch; ++b, slot += max_new) {
    const int64_t r = c.row_of(b), old = r < 0 ? 0 : c.length(r);
    const int64_t asked = r < 0 ? 0 : std::clamp<int64_t>(new_of[b], 0, max_new);
    Copy copy;
    out[b] = asked ? reserve(c, r, old, old + asked, fresh, copy) : 0;
    sources[b] = copy.source;
    destinations[b] = copy.destination;
    const int64_t served = out[b] ? 0 : asked;
    if (served) c.seq_lens[r] = static_cast<int32_t>(old + served);
    for (int64_t j = 0; j < max_new; ++j) {
      const int64_t at = old + j;
      slot[j] = j < served ? c.row(r)[at / c.page_size] * c.page_size + at % c.page_size : -1;
    }
  }
  *c.num_free = static_cast<int32_t>(c.top);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  m.impl("kv_append_slots", TORCH_BOX(&specdec::kv_append_slots));
}
