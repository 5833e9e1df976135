// What the launchers hand to the kernels: raw pointers and sizes, no framework types.
#pragma once

#include <cstdint>

namespace specdec {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// int32 or int64 values, or nothing (data == nullptr).
struct IndexView {
  const void* data = nullptr;
  bool wide = false;
  int64_t size = 0;

  explicit operator bool() const { return data != nullptr; }
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  int64_t clamped(int64_t i) const { return (*this)[i < 0 ? 0 : (i >= size ? size - 1 : i)]; }
};

struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0, width = 0, stride = 0;  // stride in elements
  bool present = false;                     // a tensor without rows has no data, but is there

  explicit operator bool() const { return present; }
};

struct ParamsView {
  const float* temperature = nullptr;
  const float* top_p = nullptr;
  const int32_t* top_k = nullptr;
  const float* min_p = nullptr;
  const int64_t* seed = nullptr;
  IndexView slots;
  int64_t size = 0;

  explicit operator bool() const { return temperature != nullptr; }
  // Element of the parameter arrays that request b reads; what lies outside them is clamped.
  int64_t slot(int64_t b) const {
    const int64_t s = slots ? slots.clamped(b) : b;
    return s < 0 ? 0 : (s >= size ? size - 1 : s);
  }
};

struct NucleusView {
  float* cutoff = nullptr;
  float* row_max = nullptr;
  float* log_mass = nullptr;
  int64_t size = 0;

  explicit operator bool() const { return cutoff != nullptr; }
};

constexpr int64_t kMaxSamples = 128;

struct RowOpArgs {  // nucleus, filter_probs, sample
  RowsView logits;
  ParamsView params;
  IndexView rows;
  int32_t filter_order = 0;
  NucleusView nucleus;
  int32_t* status = nullptr;
  float* probs = nullptr;  // filter_probs only, [N, V] contiguous
  // sample only
  const int64_t* position = nullptr;
  IndexView ids, target_to_draft;
  uint32_t stream = 0;
  int64_t num_samples = 1;
  int32_t* tokens = nullptr;  // [N, num_samples], as logprobs
  float* logprobs = nullptr;
};

constexpr int64_t kMarkovTile = 256;

struct MarkovArgs {  // markov_step, up to its draw
  RowsView base, w1, w2, logits;
  IndexView tokens;
};

enum Rule : int32_t { kRuleToken = 0, kRuleBlock = 1, kRuleCoupled = 2 };

// What verify_chain and verify_tree take alike.
struct VerifyArgs {
  RowsView target;
  bool target_is_probs = false;
  IndexView draft_tokens;
  const int32_t* cu_num_draft = nullptr;
  int64_t batch = 0;
  ParamsView params;
  const int64_t* position = nullptr;
  RowsView draft;
  bool draft_is_probs = false;
  IndexView draft_rows;
  NucleusView draft_nucleus;
  ParamsView draft_params;
  IndexView target_to_draft;
  int32_t rule = 0, filter_order = 0;
  int32_t* tokens = nullptr;  // [B, K + 1]
  int32_t* num_accepted = nullptr;
  int32_t* num_emitted = nullptr;
  int32_t* status = nullptr;
  float* logprobs = nullptr;
  NucleusView nucleus;  // [B, K + 1]
};

struct VerifyChainArgs : VerifyArgs {
  int64_t max_draft = 0;  // K
  bool emit_bonus = true;
};

enum TreeRule : int32_t {
  kTargetOnly = 0,
  kRecursive = 1,
  kTraversal = 2,
  kGreedyDraft = 3,
  kTypical = 4,  // from here on lossy, and without a q
  kThreshold = 5,
  kSynthetic = 6,
};

struct VerifyTreeArgs : VerifyArgs {
  IndexView parents;
  int64_t max_depth = 0;  // K
  bool replacement = false;
  float bound = 0.0f, factor = 0.0f;  // typical: epsilon, delta; threshold: threshold_single, threshold_acc
  const float* rates = nullptr;       // synthetic: by depth
  int64_t num_rates = 0;
  int32_t* path = nullptr;  // [B, K]
};

struct RowDecision;

// One table per instruction set; every entry does one row's or one request's work on the calling thread.
struct Kernels {
  void (*nucleus)(const RowOpArgs&, int64_t row);
  void (*filter_probs)(const RowOpArgs&, int64_t row);
  void (*sample)(const RowOpArgs&, int64_t row);
  // kMarkovTile logits of every row.
  void (*markov_logits)(const MarkovArgs&, int64_t tile);
  // Whole requests one after another, leaving at the first rejection; or the two sides of each row in parallel, then
  // the row's decision, then requests. Same results.
  void (*verify_request)(const VerifyChainArgs&, int64_t b);
  void (*look_at_target)(const VerifyChainArgs&, int64_t b, int64_t i, RowDecision& decision);
  void (*look_at_draft)(const VerifyChainArgs&, int64_t b, int64_t i, RowDecision& decision);
  bool (*decide_row)(const VerifyChainArgs&, int64_t b, int64_t i, RowDecision& decision);
  void (*verify_tree)(const VerifyTreeArgs&, int64_t b);
  void (*verify_finish)(const VerifyChainArgs&, int64_t b, RowDecision* decisions);
};

extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512;
const Kernels& kernels();

// body(i) for i in [0, n), on as many of torch's threads as the work is worth; i is handed out in ascending order.
void parallel(int64_t n, int64_t elements, void (*body)(int64_t i, void* context), void* context);

template <class F>
void parallel_for_each(int64_t n, int64_t elements, const F& f) {
  parallel(n, elements, [](int64_t i, void* context) { (*static_cast<const F*>(context))(i); }, const_cast<F*>(&f));
}

}  // namespace specdec
