// kv_compact: cache rows of accepted nodes, moved to follow their root.
#include <cstring>

#include "cpu/moves.h"

namespace specdec {
namespace {

struct Move {
  int64_t from, to;  // bytes into each cache
};

// Where the logical positions of requests are.
struct Places {
  IndexView table, slots;  // the table's rows one after another
  int64_t blocks, table_stride, pages, page_size, page_bytes, token_bytes, null_page;

  // Bytes into a cache, or -1.
  int64_t operator()(int64_t b, int64_t position) const {
    if (position < 0) return -1;
    int64_t page = b, offset = position;
    if (table) {
      const int64_t block = position / page_size;
      if (block >= blocks) return -1;
      page = table[b * table_stride + block];
      if (page == null_page) return -1;
      offset = position % page_size;
    } else if (slots) {
      page = slots[b];
    }
    if (page < 0 || page >= pages || offset >= page_size) return -1;
    return page * page_bytes + offset * token_bytes;
  }
};

void kv_compact(Tensors caches, Tensor path, Tensor seq_lens, MaybeTensor block_table, MaybeTensor slots,
                int64_t null_page) {
  constexpr const char* op = "kv_compact";
  require(path.dim() == 2, op, "path", "[B, K]");
  require(!caches.empty() && (caches[0].dim() == 3 || caches[0].dim() == 4), op, "caches", "of 3 or 4 dimensions");
  const int64_t batch = path.size(0), width = path.size(1);
  const int32_t* nodes = ints(op, "path", path, batch * width);
  const IndexView roots = index_view(op, "seq_lens", seq_lens, batch);
  const Tensor& cache = caches[0];
  const auto size = static_cast<int64_t>(cache.element_size());
  const std::vector<char*> data = addresses(op, "caches", caches);

  Places place{};
  place.pages = cache.size(0);
  place.page_size = cache.size(1);
  place.page_bytes = cache.stride(0) * size;
  place.token_bytes = cache.stride(1) * size;
  place.null_page = null_page;
  place.slots = index_view(op, "slots", slots, batch);
  if (block_table) {
    const ScalarType type = block_table->scalar_type();
    require(type == ScalarType::Int || type == ScalarType::Long, op, "block_table", "int32 or int64");
    require(block_table->dim() == 2 && block_table->size(0) == batch, op, "block_table", "[B, W]");
    dense_bytes(op, "block_table", *block_table, 1);
    place.table = {block_table->const_data_ptr(), type == ScalarType::Long, block_table->numel()};
    place.blocks = block_table->size(1);
    place.table_stride = block_table->stride(0);
  } else {
    require(slots || place.pages >= batch, op, "caches", "of at least B rows");
  }

  // A token's heads follow one another, or each lies for itself.
  int64_t heads = cache.dim() == 4 ? cache.size(2) : 1;
  const int64_t head_stride = cache.dim() == 4 ? cache.stride(2) * size : 0;
  int64_t run = dense_bytes(op, "caches", cache, cache.dim() - 1);
  const int64_t token = heads * run;
  if (heads == 1 || head_stride == run) {
    run = token;
    heads = 1;
  }

  std::vector<Move> moves;
  std::vector<int64_t> first(batch + 1);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0, before = 0; i < width; ++i) {
      const int64_t node = nodes[b * width + i];
      if (node > before && node > i + 1) {
        const Move move{place(b, roots[b] + node), place(b, roots[b] + i + 1)};
        if (move.from >= 0 && move.to >= 0) moves.push_back(move);
      }
      before = node;
    }
    first[b + 1] = static_cast<int64_t>(moves.size());
  }
  const auto count = static_cast<int64_t>(data.size());
  parallel_for_each(count * batch, count * first[batch] * token / 4, [&](int64_t item) {
    char* base = data[item / batch];
    const int64_t b = item % batch;
    // Ascending, as a destination may be the source of an earlier move: a source never lies before its destination.
    for (int64_t m = first[b]; m < first[b + 1]; ++m)
      for (int64_t h = 0; h < heads; ++h)
        std::memmove(base + moves[m].to + h * head_stride, base + moves[m].from + h * head_stride, run);
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("kv_compact", TORCH_BOX(&specdec::kv_compact)); }
