// The largest value whose upper set {v : v >= value} weighs at least a goal: top-k with unit weights, top-p with
// masses. A histogram of 256 buckets over the range finds the bucket that crosses the goal, then that bucket is
// searched alike.
#pragma once

#include "core/nucleus.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"

namespace specdec::SPECDEC_ISA {

SPECDEC_HD void fill(float* out, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// weights[i] = 2^((values[i] - row_max) * scale). Writes whole bundles of lanes: arrays are padded for it.
SPECDEC_HD void weigh(const float* values, float* weights, int64_t n, float row_max, float scale) {
  const LanesF m(row_max), c(scale);
  for (int64_t i = 0; i < n; i += kLanes) store(weights + i, exp2_floor((load(values + i) - m) * c));
}

struct Threshold {
  float value;  // -inf if the goal is not reached
};

constexpr int kBuckets = 256;
constexpr int64_t kSmall = 48;
constexpr int kMaxLevels = 8;

SPECDEC_HD void value_range(const float* v, int64_t n, float& low, float& high) {
  LanesF lo(v[0]), hi(v[0]);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const LanesF a = load(v + i);
    hi = larger(a, hi);
    lo = select(lo > a, a, lo);
  }
  float x[kLanes];
  store(x, lo);
  low = x[0];
  for (int l = 1; l < kLanes; ++l) low = x[l] < low ? x[l] : low;
  high = horizontal_max(hi);
  for (; i < n; ++i) {
    low = v[i] < low ? v[i] : low;
    high = v[i] > high ? v[i] : high;
  }
}

// Sorts both arrays by descending value: insertion for few, heap sort for the rest (bounded whatever the values).
SPECDEC_HD void sort_descending(float* v, float* w, int64_t n) {
  if (n <= kSmall) {
    for (int64_t i = 1; i < n; ++i) {
      const float a = v[i], b = w[i];
      int64_t j = i;
      for (; j > 0 && v[j - 1] < a; --j) v[j] = v[j - 1], w[j] = w[j - 1];
      v[j] = a, w[j] = b;
    }
    return;
  }
  const auto sift = [&](int64_t root, int64_t end) {  // smallest on top
    const float a = v[root], b = w[root];
    for (int64_t child; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && v[child + 1] < v[child]) ++child;
      if (!(v[child] < a)) break;
      v[root] = v[child], w[root] = w[child];
    }
    v[root] = a, w[root] = b;
  };
  for (int64_t i = n / 2 - 1; i >= 0; --i) sift(i, n);
  for (int64_t end = n - 1; end > 0; --end) {
    const float a = v[0], b = w[0];
    v[0] = v[end], w[0] = w[end];
    v[end] = a, w[end] = b;
    sift(0, end);
  }
}

// Searches the finite values v[0..n) with weights w[0..n), both overwritten. `above` is the weight of larger values,
// not among them; then of all values over the range still searched.
inline Threshold find_threshold(float* v, float* w, int64_t n, double goal, double above = 0.0) {
  if (n <= 0) return {-kInf};
  bool certain = false;  // a histogram has shown that the range reaches the goal
  for (int level = 0; n > kSmall && level < kMaxLevels; ++level) {
    float low, high;
    value_range(v, n, low, high);
    const float range = high - low;
    if (!(range > 1e-30f && range < 1e38f)) break;
    const LanesF top(high), step(static_cast<float>(kBuckets) / range), last(static_cast<float>(kBuckets - 1));
    double mass[kBuckets] = {};
    const auto bucket_of = [&](int64_t i) {
      const LanesF b = (top - load(v + i)) * step;
      return to_int(select(last > b, b, last));
    };
    for (int64_t i = 0; i < n; i += kLanes) {
      const LanesI b = bucket_of(i);
      int32_t index[kLanes];
      store(index, b);
      const int64_t m = n - i < kLanes ? n - i : kLanes;
      for (int64_t l = 0; l < m; ++l) mass[index[l]] += w[i + l];
    }
    int hit = 0;
    double sum = above;
    for (; hit < kBuckets && !(mass[hit] > 0.0 && sum + mass[hit] >= goal); ++hit) sum += mass[hit];
    if (hit == kBuckets) {
      if (!certain) return {-kInf};
      break;  // sums in another order rounded short: the smallest of the range is the answer, found below
    }
    certain = true;
    above = sum;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += kLanes) {  // never writes past what it has read
      const int64_t m = n - i < kLanes ? n - i : kLanes;
      const uint32_t in_hit = bits(bucket_of(i) == LanesI(hit)) & ((1u << m) - 1);
      const LanesF x = load(v + i), y = load(w + i);
      compress(v + kept, x, in_hit);
      compress(w + kept, y, in_hit);
      kept += __builtin_popcount(in_hit);
    }
    n = kept;
  }
  float low, high;
  value_range(v, n, low, high);
  if (low == high) {
    double sum = above;
    for (int64_t i = 0; i < n; ++i) sum += w[i];
    return {certain || sum >= goal ? low : -kInf};
  }
  sort_descending(v, w, n);
  for (int64_t i = 0; i < n; ++i) {
    above += w[i];
    if (above >= goal) return {v[i]};
  }
  return {certain ? low : -kInf};
}

SPECDEC_HD Threshold find_threshold(Scratch& s, int64_t n, double goal) {
  return find_threshold(s.values, s.weights, n, goal);
}

// The candidates, kept for later, into the work arrays.
SPECDEC_HD void copy_candidates(Scratch& s, int64_t n, bool unit_weights) {
  std::memcpy(s.work_values, s.values, n * sizeof(float));
  if (unit_weights)
    fill(s.work_weights, n, 1.0f);
  else
    std::memcpy(s.work_weights, s.weights, n * sizeof(float));
}

SPECDEC_HD Threshold find_threshold_of_copy(Scratch& s, int64_t n, double goal, double above = 0.0) {
  return find_threshold(s.work_values, s.work_weights, n, goal, above);
}

// Weight of the candidates >= cutoff, in the row's order.
SPECDEC_HD double mass_from(const Scratch& s, int64_t n, float cutoff) {
  constexpr int64_t kChunk = 4096;
  const LanesF bound(cutoff), zero(0.0f);
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t end = start + kChunk < n ? start + kChunk : n;
    LanesF sum(0.0f);
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) sum = sum + select(load(s.values + i) >= bound, load(s.weights + i), zero);
    if (i < end)
      sum = sum + select(load_partial(s.values + i, end - i, -kInf) >= bound,
                         load_partial(s.weights + i, end - i, 0.0f), zero);
    total += horizontal_sum(sum);
  }
  return total;
}

SPECDEC_HD float least_value(const Scratch& s, int64_t n) {
  float low, high;
  value_range(s.values, n, low, high);
  return low;
}

// The finite lane maxima into scratch.values; returns how many. (-inf lanes belong to tails and masked tiles.)
SPECDEC_HD int64_t finite_lane_maxima(int64_t tiles, Scratch& s) {
  int64_t n = 0;
  for (int64_t i = 0; i < tiles * kLanes; ++i) {
    s.values[n] = s.lane_max[i];
    n += s.lane_max[i] > -kInf;
  }
  return n;
}

}  // namespace specdec::SPECDEC_ISA
