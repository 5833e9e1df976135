// From torch's tensors (stable ABI only) to the views that the kernels take. Shapes, dtypes and devices have been
// checked by the public Python functions; what is checked here keeps a direct caller of the op from reading out of
// bounds.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "cpu/args.h"

// The op namespace, in one place, so that two builds of the package can live in one process.
#ifndef SPECDEC_NAMESPACE
#define SPECDEC_NAMESPACE specdec_kernels
#endif

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline void require(bool ok, const char* op, const char* name, const char* must) {
  STD_TORCH_CHECK(ok, op, ": ", name, " must be ", must);
}

inline RowsView rows_view(const char* op, const char* name, const Tensor& t) {
  require(t.dim() == 2 && (t.size(1) <= 1 || t.stride(1) == 1), op, name,
          "[rows, vocab], contiguous in its last dimension");
  RowsView view;
  switch (t.scalar_type()) {
    case ScalarType::Float:
      view.dtype = DType::kFloat32;
      break;
    case ScalarType::BFloat16:
      view.dtype = DType::kBFloat16;
      break;
    case ScalarType::Half:
      view.dtype = DType::kFloat16;
      break;
    default:
      require(false, op, name, "float32, bfloat16 or float16");
  }
  view.data = t.const_data_ptr();
  view.rows = t.size(0);
  view.width = t.size(1);
  view.stride = t.stride(0);
  view.present = true;
  return view;
}

inline RowsView rows_view(const char* op, const char* name, const MaybeTensor& t) {
  return t ? rows_view(op, name, *t) : RowsView{};
}

inline IndexView index_view(const char* op, const char* name, const Tensor& t, int64_t at_least) {
  const ScalarType type = t.scalar_type();
  require(type == ScalarType::Int || type == ScalarType::Long, op, name, "int32 or int64");
  require(t.dim() == 1 && t.size(0) >= at_least && (t.size(0) <= 1 || t.stride(0) == 1), op, name,
          "1-D, contiguous and long enough");
  return {t.const_data_ptr(), type == ScalarType::Long, t.size(0)};
}

inline IndexView index_view(const char* op, const char* name, const MaybeTensor& t, int64_t at_least) {
  return t ? index_view(op, name, *t, at_least) : IndexView{};
}

template <class T>
T* vector_data(const char* op, const char* name, const Tensor& t, ScalarType type, int64_t at_least) {
  require(t.scalar_type() == type && t.is_contiguous() && t.numel() >= at_least, op, name,
          "of the documented dtype, contiguous and long enough");
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}

template <class T>
T* vector_data(const char* op, const char* name, const MaybeTensor& t, ScalarType type, int64_t at_least) {
  return t ? vector_data<T>(op, name, *t, type, at_least) : nullptr;
}

inline float* floats(const char* op, const char* name, const MaybeTensor& t, int64_t at_least) {
  return vector_data<float>(op, name, t, ScalarType::Float, at_least);
}
inline int32_t* ints(const char* op, const char* name, const Tensor& t, int64_t at_least) {
  return vector_data<int32_t>(op, name, t, ScalarType::Int, at_least);
}

inline ParamsView params_view(const char* op, const MaybeTensor& temperature, const MaybeTensor& top_p,
                              const MaybeTensor& top_k, const MaybeTensor& min_p, const MaybeTensor& slots,
                              int64_t batch) {
  ParamsView view;
  if (!temperature) return view;
  require(top_p && top_k && min_p, op, "parameters", "given together");
  view.size = temperature->numel();
  require(view.size >= 1 && (slots || view.size >= batch), op, "temperature", "[B], or [S >= 1] with slots");
  view.temperature = floats(op, "temperature", temperature, view.size);
  view.top_p = floats(op, "top_p", top_p, view.size);
  view.top_k = vector_data<int32_t>(op, "top_k", top_k, ScalarType::Int, view.size);
  view.min_p = floats(op, "min_p", min_p, view.size);
  view.slots = index_view(op, "slots", slots, batch);
  return view;
}

inline NucleusView nucleus_view(const char* op, const MaybeTensor& cutoff, const MaybeTensor& row_max,
                                const MaybeTensor& log_mass, int64_t at_least) {
  if (!cutoff) return {};
  require(row_max && log_mass, op, "nucleus", "three tensors");
  return {floats(op, "cutoff", cutoff, at_least), floats(op, "row_max", row_max, at_least),
          floats(op, "log_mass", log_mass, at_least), cutoff->numel()};
}

// What sample and markov_step take alike; `logits` are the rows that are drawn from.
inline RowOpArgs sample_args(const char* op, const RowsView& logits, const Tensor& temperature, const Tensor& top_p,
                             const Tensor& top_k, const Tensor& min_p, const Tensor& seed, const MaybeTensor& slots,
                             const MaybeTensor& position, const MaybeTensor& rows, const MaybeTensor& ids,
                             const MaybeTensor& target_to_draft, int64_t stream, int64_t filter_order,
                             const Tensor& tokens, const Tensor& status, const MaybeTensor& cutoff,
                             const MaybeTensor& row_max, const MaybeTensor& log_mass) {
  RowOpArgs a;
  a.logits = logits;
  const int64_t n = a.logits.rows;
  a.params = params_view(op, temperature, top_p, top_k, min_p, slots, rows ? 1 : n);
  a.params.seed = vector_data<int64_t>(op, "seed", seed, ScalarType::Long, a.params.size);
  a.position = vector_data<int64_t>(op, "position", position, ScalarType::Long, n);
  a.rows = index_view(op, "rows", rows, n);
  a.ids = index_view(op, "ids", ids, n);
  a.target_to_draft = index_view(op, "target_to_draft", target_to_draft, 1);
  a.stream = static_cast<uint32_t>(stream);
  a.filter_order = static_cast<int32_t>(filter_order);
  a.num_samples = tokens.dim() == 2 ? tokens.size(1) : 1;
  require(a.num_samples >= 1 && a.num_samples <= kMaxSamples, op, "tokens", "[N] or [N, num_samples <= 128]");
  a.tokens = ints(op, "tokens", tokens, n * a.num_samples);
  a.status = ints(op, "status", status, n);
  a.nucleus = nucleus_view(op, cutoff, row_max, log_mass, n);
  return a;
}

// What verify_chain and verify_tree take alike.
inline void fill_verify_args(const char* op, VerifyArgs& a, const Tensor& target, bool target_is_probs,
                             const Tensor& draft_tokens, const Tensor& cu_num_draft, const Tensor& temperature,
                             const Tensor& top_p, const Tensor& top_k, const Tensor& min_p, const Tensor& seed,
                             const MaybeTensor& slots, const MaybeTensor& position, const MaybeTensor& draft,
                             bool draft_is_probs, const MaybeTensor& draft_rows, const MaybeTensor& draft_cutoff,
                             const MaybeTensor& draft_row_max, const MaybeTensor& draft_log_mass,
                             const MaybeTensor& draft_temperature, const MaybeTensor& draft_top_p,
                             const MaybeTensor& draft_top_k, const MaybeTensor& draft_min_p,
                             const MaybeTensor& draft_slots, const MaybeTensor& target_to_draft, int64_t filter_order,
                             const Tensor& tokens, const Tensor& num_accepted, const Tensor& num_emitted,
                             const Tensor& status, const MaybeTensor& logprobs, const MaybeTensor& cutoff,
                             const MaybeTensor& row_max, const MaybeTensor& log_mass) {
  require(tokens.dim() == 2 && tokens.size(1) >= 1, op, "tokens", "[B, K + 1]");
  a.batch = tokens.size(0);
  const int64_t outputs = tokens.numel();
  a.target = rows_view(op, target_is_probs ? "target_probs" : "target_logits", target);
  a.target_is_probs = target_is_probs;
  a.draft_tokens = index_view(op, "draft_tokens", draft_tokens, 0);
  a.cu_num_draft = ints(op, "cu_num_draft", cu_num_draft, a.batch + 1);
  a.params = params_view(op, temperature, top_p, top_k, min_p, slots, a.batch);
  a.params.seed = vector_data<int64_t>(op, "seed", seed, ScalarType::Long, a.params.size);
  a.position = vector_data<int64_t>(op, "position", position, ScalarType::Long, a.batch);
  a.draft = rows_view(op, draft_is_probs ? "draft_probs" : "draft_logits", draft);
  a.draft_is_probs = draft_is_probs;
  a.draft_rows = index_view(op, "draft_rows", draft_rows, 0);
  a.draft_nucleus =
      nucleus_view(op, draft_cutoff, draft_row_max, draft_log_mass, draft_cutoff ? draft_cutoff->numel() : 0);
  a.draft_params = params_view(op, draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots, a.batch);
  require(!a.draft || a.draft_is_probs || a.draft_params, op, "draft_params", "given with draft_logits");
  a.target_to_draft = index_view(op, "target_to_draft", target_to_draft, a.target.width);
  a.filter_order = static_cast<int32_t>(filter_order);
  a.tokens = ints(op, "tokens", tokens, outputs);
  a.num_accepted = ints(op, "num_accepted", num_accepted, a.batch);
  a.num_emitted = ints(op, "num_emitted", num_emitted, a.batch);
  a.status = ints(op, "status", status, a.batch);
  a.logprobs = floats(op, "logprobs", logprobs, outputs);
  a.nucleus = nucleus_view(op, cutoff, row_max, log_mass, outputs);
}

}  // namespace specdec
