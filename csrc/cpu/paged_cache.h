// A paged cache's bookkeeping, as its ops take it: block table, free list, reference counts.
#pragma once

#include <algorithm>

#include "cpu/tensors.h"

namespace specdec {

// Bits of specdec_kernels.CacheStatus.
enum : int32_t { kBadPage = 1, kBadRefCount = 2, kFreeListFull = 4, kOutOfPages = 8, kTableFull = 16, kEvicted = 32 };

struct PagedCache {
  int32_t *seq_lens, *block_table, *free_pages, *num_free, *ref_counts;
  IndexView slots;  // row of each request of the batch; none: its own number
  int64_t batch, rows, columns, stride, pages, page_size, null_page;
  int64_t top;  // entries of the free list, kept here while an op runs

  bool holds(int64_t page) const { return page >= 0 && page < pages && page != null_page; }
  // Row of the tables of request b, or -1 for one that is skipped.
  int64_t row_of(int64_t b) const {
    if (!slots) return b;
    const int64_t row = slots[b];
    return row >= 0 && row < rows ? row : -1;
  }
  // Blocks that so many tokens fill or begin.
  int64_t blocks(int64_t tokens) const { return tokens / page_size + (tokens % page_size != 0); }
  int32_t* row(int64_t r) const { return block_table + r * stride; }
  int64_t length(int64_t r) const { return std::max(seq_lens[r], 0); }
};

// Lets a holder's hold of `page` go; returns status bits.
inline int32_t release(PagedCache& c, int64_t page) {
  if (!c.holds(page)) return kBadPage;
  if (c.ref_counts) {
    if (c.ref_counts[page] < 1) return kBadRefCount;
    if (--c.ref_counts[page] > 0) return 0;
  }
  if (c.top == c.pages) return kFreeListFull;
  c.free_pages[c.top++] = static_cast<int32_t>(page);
  return 0;
}

inline PagedCache paged_cache(const char* op, const Tensor& seq_lens, const Tensor& block_table,
                              const Tensor& free_pages, const Tensor& num_free, const MaybeTensor& ref_counts,
                              const MaybeTensor& slots, int64_t page_size, int64_t null_page) {
  PagedCache c;
  require(block_table.dim() == 2 && block_table.scalar_type() == ScalarType::Int &&
              (block_table.size(1) <= 1 || block_table.stride(1) == 1),
          op, "block_table", "int32 [B, M], contiguous in its last dimension");
  require(page_size >= 1, op, "page_size", ">= 1");
  c.rows = block_table.size(0);
  c.batch = slots ? slots->numel() : c.rows;
  c.slots = index_view(op, "slots", slots, c.batch);
  c.columns = block_table.size(1);
  c.stride = block_table.stride(0);
  c.block_table = static_cast<int32_t*>(const_cast<void*>(block_table.const_data_ptr()));
  c.seq_lens = ints(op, "seq_lens", seq_lens, c.rows);
  c.pages = free_pages.numel();
  c.page_size = page_size;
  c.null_page = null_page;
  c.free_pages = ints(op, "free_pages", free_pages, c.pages);
  c.num_free = ints(op, "num_free", num_free, 1);
  c.ref_counts = vector_data<int32_t>(op, "ref_counts", ref_counts, ScalarType::Int, c.pages);
  c.top = std::clamp<int64_t>(*c.num_free, 0, c.pages);
  return c;
}

}  // namespace specdec
