// state_select: the snapshot behind the last accepted token becomes the state.
#include <cstring>

#include "cpu/moves.h"

namespace specdec {
namespace {

void state_select(Tensors states, Tensors out, Tensor num_accepted, MaybeTensor indices) {
  constexpr const char* op = "state_select";
  const int64_t batch = num_accepted.numel();
  const int32_t* accepted = ints(op, "num_accepted", num_accepted, batch);
  require(!states.empty() && states[0].dim() >= 2, op, "states", "[B, S, ...]");
  const Tensor& state = states[0];
  const auto size = static_cast<int64_t>(state.element_size());
  const int64_t snapshots = state.size(1), bytes = dense_bytes(op, "states", state, 2);
  require(state.size(0) >= batch && snapshots >= 1, op, "states", "[>= B, S >= 1, ...]");
  const std::vector<char*> from = addresses(op, "states", states), into = addresses(op, "out", out);
  const bool in_place = out.empty();
  const IndexView rows = index_view(op, "indices", indices, batch);
  if (!in_place) {
    require(out.size() == states.size() && out[0].dim() >= 1, op, "out", "a tensor for each state");
    require(dense_bytes(op, "out", out[0], 1) == bytes, op, "out", "of the states' size");
    require(rows || out[0].size(0) >= batch, op, "out", "of at least B rows");
  }
  const int64_t row_bytes = state.stride(0) * size, snapshot_bytes = state.stride(1) * size;
  const int64_t out_rows = in_place ? 0 : out[0].size(0), out_bytes = in_place ? 0 : out[0].stride(0) * size;
  const auto count = static_cast<int64_t>(from.size());
  parallel_for_each(count * batch, count * batch * bytes / 4, [&](int64_t item) {
    const int64_t layer = item / batch, b = item % batch;
    const int64_t asked = accepted[b] < 0 ? 0 : accepted[b], j = asked < snapshots ? asked : snapshots - 1;
    const char* source = from[layer] + b * row_bytes + j * snapshot_bytes;
    if (in_place) {
      if (j > 0) std::memcpy(from[layer] + b * row_bytes, source, bytes);
      return;
    }
    const int64_t row = rows ? rows[b] : b;
    if (row >= 0 && row < out_rows) std::memcpy(into[layer] + row * out_bytes, source, bytes);
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("state_select", TORCH_BOX(&specdec::state_select)); }
