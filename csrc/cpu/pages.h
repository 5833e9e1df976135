// Caches of one layout, page by page, as kv_copy_pages and kv_scrub take them.
#pragma once

#include "cpu/moves.h"

namespace specdec {

struct PagedCaches {
  std::vector<char*> data;
  int64_t pages, page_size, page_bytes;  // page_bytes: from one page to the next
  int64_t token_bytes, heads, head_bytes, run;

  bool holds(int64_t page) const { return page >= 0 && page < pages; }
  // Bytes of a page that are a cache's own.
  int64_t size() const { return page_size * heads * run; }

  // f(offset, bytes) of each run of bytes that lie contiguously, of a page's tokens `first` and up.
  template <class F>
  void runs(int64_t first, const F& f) const {
    const int64_t tokens = page_size - first;
    if (first == 0 && token_bytes == run && head_bytes == page_size * run) {
      f(0, heads * head_bytes);
    } else if (heads == 1 && token_bytes == run) {
      f(first * token_bytes, tokens * run);
    } else if (token_bytes == run) {
      for (int64_t h = 0; h < heads; ++h) f(h * head_bytes + first * run, tokens * run);
    } else {
      for (int64_t t = first; t < page_size; ++t)
        for (int64_t h = 0; h < heads; ++h) f(t * token_bytes + h * head_bytes, run);
    }
  }
};

inline PagedCaches paged_caches(const char* op, const Tensors& caches) {
  require(!caches.empty() && (caches[0].dim() == 3 || caches[0].dim() == 4), op, "caches", "of 3 or 4 dimensions");
  const Tensor& cache = caches[0];
  const auto size = static_cast<int64_t>(cache.element_size());
  PagedCaches c;
  c.data = addresses(op, "caches", caches);
  c.pages = cache.size(0);
  c.page_size = cache.size(1);
  c.page_bytes = cache.stride(0) * size;
  c.token_bytes = cache.stride(1) * size;
  c.heads = cache.dim() == 4 ? cache.size(2) : 1;
  c.head_bytes = cache.dim() == 4 ? cache.stride(2) * size : 0;
  c.run = dense_bytes(op, "caches", cache, cache.dim() - 1);
  if (c.head_bytes == c.run) {
    c.run *= c.heads;
    c.heads = 1;
  }
  return c;
}

}  // namespace specdec
