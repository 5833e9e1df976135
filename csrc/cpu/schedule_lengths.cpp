// schedule_lengths: drafts in the order of their survival, admitted one by one.
#include <algorithm>
#include <vector>

#include "cpu/tensors.h"

namespace specdec {
namespace {

constexpr int64_t kFixed = int64_t{1} << 40;

struct Candidate {
  float survives;
  int64_t offset, request;

  bool operator<(const Candidate& other) const {
    if (survives != other.survives) return survives > other.survives;
    return offset != other.offset ? offset < other.offset : request < other.request;
  }
};

void schedule_lengths(Tensor confidence, MaybeTensor num_draft, MaybeTensor steps_per_second, int64_t budget,
                      Tensor lengths) {
  constexpr const char* op = "schedule_lengths";
  require(confidence.dim() == 2, op, "confidence", "[B, K]");
  const int64_t batch = confidence.size(0), width = confidence.size(1);
  const auto* c = vector_data<float>(op, "confidence", confidence, ScalarType::Float, batch * width);
  const IndexView counts = index_view(op, "num_draft", num_draft, batch);
  int32_t* out = ints(op, "lengths", lengths, batch);
  std::vector<Candidate> order;
  for (int64_t b = 0; b < batch; ++b) {
    out[b] = 0;
    const int64_t asked = counts ? counts[b] : width, count = asked < 0 ? 0 : (asked < width ? asked : width);
    float survives = 1.0f;
    for (int64_t j = 0; j < count; ++j) {
      const float x = c[b * width + j];
      survives *= x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;  // NaN is 0
      order.push_back({survives, j, b});
    }
  }
  std::sort(order.begin(), order.end());
  const int64_t total = static_cast<int64_t>(order.size());
  if (!steps_per_second) {
    for (int64_t n = 0; n < total && n < budget; ++n) ++out[order[n].request];
    return;
  }
  const int64_t most = steps_per_second->numel() - 1;
  const float* rate_of = floats(op, "steps_per_second", steps_per_second, 1);
  // In fixed point: the sum is the same in any order.
  int64_t tau = batch * kFixed;
  double best = static_cast<double>(tau) * rate_of[batch < most ? batch : most];
  for (int64_t n = 0; n < total && batch + n + 1 <= most; ++n) {
    tau += static_cast<int64_t>(order[n].survives * static_cast<float>(kFixed));
    const double rate = static_cast<double>(tau) * rate_of[batch + n + 1];
    if (!(rate > best)) return;
    best = rate;
    ++out[order[n].request];
  }
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  m.impl("schedule_lengths", TORCH_BOX(&specdec::schedule_lengths));
}
