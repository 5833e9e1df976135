// kv_copy_pages: whole pages, copied to others.
#include <cstring>

#include "cpu/pages.h"

namespace specdec {
namespace {

struct Copy {
  int64_t from, to;  // bytes into each cache
};

void kv_copy_pages(Tensors caches, Tensor src, Tensor dst) {
  constexpr const char* op = "kv_copy_pages";
  const PagedCaches c = paged_caches(op, caches);
  const IndexView source = index_view(op, "src", src, 0), destination = index_view(op, "dst", dst, source.size);
  std::vector<Copy> copies;
  for (int64_t n = 0; n < source.size; ++n)
    if (c.holds(source[n]) && c.holds(destination[n]))
      copies.push_back({source[n] * c.page_bytes, destination[n] * c.page_bytes});
  const auto count = static_cast<int64_t>(copies.size()), total = static_cast<int64_t>(c.data.size()) * count;
  parallel_for_each(total, total * c.size() / 4, [&](int64_t item) {
    char* base = c.data[item / count];
    const Copy copy = copies[item % count];
    // The caller's promise is that pages do not overlap; memmove, so that a page copied to itself is defined too.
    c.runs(0, [&](int64_t at, int64_t bytes) { std::memmove(base + copy.to + at, base + copy.from + at, bytes); });
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_copy_pages", TORCH_BOX(&specdec::kv_copy_pages)); }
