// Where the threshold of top-p probably lies, from a sample of the row: an interval a few standard deviations wide. The
// callers check what it contains, so a wrong guess costs time, not correctness.
#pragma once

#include "core/nucleus.h"
#include "cpu/lanes.h"
#include "cpu/threshold.h"

namespace specdec::SPECDEC_ISA {

struct Bracket {
  float low, high;
  bool useful;
};

// Every stride-th bundle of a row.
struct Sampling {
  int64_t bundles, stride;
  explicit Sampling(int64_t vocab) : bundles(vocab / kLanes) {
    const int64_t wanted = bundles / 16 < 256 ? bundles / 16 : 256;
    stride = wanted > 0 ? bundles / wanted : 0;
  }
  bool useful() const { return stride >= 2; }
};

// The mass below the threshold: known, or a share of a total that the sample estimates too.
struct Left {
  double mass, share;
};

// What is estimated is the mass below the threshold, which many small values make up. Buckets divide [low, high),
// high - low = range.
template <class T>
SPECDEC_HD Bracket bracket_in(const T* z, const Sampling& s, float low, float range, float scale, const Left& left) {
  const float high = low + range;
  const LanesF from(low), m(high), c(scale), zero(0.0f), step(static_cast<float>(kBuckets) / range);
  LanesF below(0.0f), below2(0.0f);
  float mass[kBuckets] = {}, square[kBuckets] = {};
  for (int64_t i = 0; i < s.bundles; i += s.stride) {
    const LanesF a = load(z + i * kLanes), w = exp2_floor((a - m) * c);
    const LanesM in = a >= from;
    const LanesF tail = select(in, zero, w);
    below = below + tail;
    below2 = below2 + tail * tail;
    uint32_t hit = bits(in);
    if (!hit) continue;
    int32_t index[kLanes];
    float x[kLanes];
    store(index, to_int(larger((a - from) * step, zero)));
    store(x, w);
    for (; hit; hit &= hit - 1) {
      const int l = __builtin_ctz(hit);
      const int b = index[l] < kBuckets ? index[l] : kBuckets - 1;
      mass[b] += x[l];
      square[b] += x[l] * x[l];
    }
  }
  const double f = static_cast<double>(s.stride);
  double sum = horizontal_sum(below), square_sum = horizontal_sum(below2), total = sum, square_total = square_sum;
  for (int b = 0; b < kBuckets; ++b) total += mass[b], square_total += square[b];
  const double share = left.share, target = left.mass + share * f * total;
  Bracket bracket{low, kInf, true};
  for (int b = 0; b < kBuckets; ++b) {
    const double variance = (1.0 - share) * (1.0 - share) * square_sum + share * share * (square_total - square_sum);
    const double estimate = f * sum, deviation = 2.5 * f * __builtin_sqrt(variance > 0.0 ? variance : 0.0);
    const float edge = low + static_cast<float>(b) * (range / kBuckets);
    if (estimate + deviation <= target) bracket.low = edge;
    if (estimate - deviation > target) {
      bracket.high = edge;
      break;
    }
    sum += mass[b];
    square_sum += square[b];
  }
  return bracket;
}

// After the row was scanned: `low` is a bound of the threshold that is certain, `left` the mass that top-p leaves out.
// Worth it where many values are above `low`.
template <class T>
SPECDEC_HD Bracket estimate_bracket(const T* z, int64_t vocab, float low, float row_max, float scale, double left) {
  constexpr int64_t kMany = 2048;
  const Sampling s(vocab);
  const Bracket none{low, kInf, false};
  const float range = row_max - low;
  if (!s.useful() || !(range > 1e-30f && range < 1e38f)) return none;
  const LanesF from(low);
  int64_t inside = 0;
  for (int64_t i = 0; i < s.bundles; i += s.stride) inside += __builtin_popcount(bits_from(load(z + i * kLanes), from));
  return inside * s.stride < kMany ? none : bracket_in(z, s, low, range, scale, {left, 0.0});
}

// Before the row is scanned: values that weigh less than 2^-16 of the sample's largest are left below the buckets.
template <class T>
SPECDEC_HD Bracket guess_bracket(const T* z, int64_t vocab, float scale, float top_p) {
  constexpr float kSpan = 16.0f;
  const Sampling s(vocab);
  const Bracket none{-kInf, kInf, false};
  if (!s.useful()) return none;
  LanesF largest(-kInf);
  for (int64_t i = 0; i < s.bundles; i += s.stride) largest = larger(load(z + i * kLanes), largest);
  const float high = horizontal_max(largest), range = kSpan / scale, low = high - range;
  if (!(low > -1e38f && high < 1e38f && range > 1e-30f && low + range > low)) return none;
  return bracket_in(z, s, low, range, scale, {0.0, 1.0 - static_cast<double>(top_p)});
}

}  // namespace specdec::SPECDEC_ISA
