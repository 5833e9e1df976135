// A row as a distribution: filtered logits, probabilities taken as they are, or one-hot.
#pragma once

#include "core/nucleus.h"
#include "cpu/args.h"
#include "cpu/lanes.h"

namespace specdec::SPECDEC_ISA {

// Calls f with the row's typed pointer.
template <class F>
SPECDEC_HD auto with_row(const RowsView& view, int64_t row, const F& f) {
  const int64_t offset = row * view.stride;
  switch (view.dtype) {
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(view.data) + offset);
    case DType::kFloat16:
      return f(static_cast<const Half*>(view.data) + offset);
    default:
      return f(static_cast<const float*>(view.data) + offset);
  }
}

// A row's values by target id: the row itself, or through a map to its columns (ids without one get `missing`).
struct Columns {
  const RowsView* view = nullptr;
  int64_t row = 0;
  IndexView map;

  SPECDEC_HD float one(int64_t v, float missing) const {
    const int64_t column = map ? map[v] : v;
    if (column < 0 || column >= view->width) return missing;
    return with_row(*view, row, [&](const auto* z) { return load_one(z + column); });
  }
  // Ids v..v + n - 1 (at most 16), then `missing`.
  SPECDEC_HD LanesF lanes(int64_t v, int64_t n, float missing) const {
    if (!map && n >= kLanes && v + kLanes <= view->width)
      return with_row(*view, row, [&](const auto* z) { return load(z + v); });
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = i < n ? one(v + i, missing) : missing;
    return load(x);
  }
};

enum class Kind { kLogits, kProbs, kOneHot };

struct Dist {
  Kind kind = Kind::kLogits;
  Columns source;
  Nucleus nucleus = {kInf, -kInf, -kInf};
  Filter filter = {};
  int64_t token = -1;  // kOneHot

  SPECDEC_HD float prob(int64_t v) const {
    if (kind == Kind::kOneHot) return v == token ? 1.0f : 0.0f;
    if (kind == Kind::kLogits) return probability(source.one(v, -kInf), nucleus, filter.scale);
    return source.one(v, 0.0f);
  }

  SPECDEC_HD float log_prob(int64_t v) const {
    if (kind == Kind::kOneHot) return v == token ? 0.0f : -kInf;
    if (kind == Kind::kProbs) {
      const float p = source.one(v, 0.0f);
      return p > 0.0f ? log_pos(p > kLeastNormal ? p : kLeastNormal) : -kInf;
    }
    const float z = source.one(v, -kInf);
    if (!(z >= nucleus.cutoff) || !(z > -kInf)) return -kInf;
    return (z == nucleus.row_max ? 0.0f : (z - nucleus.row_max) * filter.inv_temperature) - nucleus.log_mass;
  }

  // Log-weights of ids v..v + n - 1, not normalised for logits; -inf where a token has no probability.
  SPECDEC_HD LanesF log_weights(int64_t v, int64_t n) const {
    const LanesF none(-kInf);
    if (kind == Kind::kProbs) {
      const LanesF p = source.lanes(v, n, 0.0f);
      const LanesM positive = p > LanesF(0.0f);
      return any(positive) ? select(positive, log_pos(larger(p, LanesF(kLeastNormal))), none) : none;
    }
    const LanesF z = source.lanes(v, n, -kInf), m(nucleus.row_max);
    const LanesF w = select(z == m, LanesF(0.0f), (z - m) * LanesF(filter.inv_temperature));
    return select((z >= LanesF(nucleus.cutoff)) & (z > none), w, none);
  }

  // Probabilities of ids v..v + n - 1; 0 for what is not positive (NaN included).
  SPECDEC_HD LanesF probs(int64_t v, int64_t n) const {
    const LanesF zero(0.0f), none(-kInf);
    if (kind == Kind::kOneHot) {
      float x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = v + i == token ? 1.0f : 0.0f;
      return load(x);
    }
    if (kind == Kind::kProbs) {
      const LanesF p = source.lanes(v, n, 0.0f);
      return select(p > zero, p, zero);
    }
    const LanesF z = source.lanes(v, n, -kInf), m(nucleus.row_max);
    const LanesF t = select(z == m, zero, (z - m) * LanesF(filter.scale)) - LanesF(nucleus.log_mass * kLog2e);
    return select((z >= LanesF(nucleus.cutoff)) & (z > none), exp2_neg(t), zero);
  }
};

// First id whose value equals `value`, or `count` if there is none.
SPECDEC_HD int64_t first_equal(const Columns& source, int64_t count, float value) {
  const LanesF wanted(value);
  for (int64_t v = 0; v < count; v += kLanes) {
    const int64_t n = count - v < kLanes ? count - v : kLanes;
    if (!any(source.lanes(v, n, -kInf) == wanted)) continue;
    for (int64_t i = v; i < v + n; ++i)
      if (source.one(i, -kInf) == value) return i;
  }
  return count;
}

}  // namespace specdec::SPECDEC_ISA
