// One row of logits to its Nucleus: the row is read from memory once, in tiles of 4,096 tokens that stay in the
// first-level cache while their maximum and mass are taken. What can lie in the nucleus is then collected from the
// tiles that hold any; of a flat row, what lies in a guessed bracket of the threshold is collected by the scan itself.
//
// Masses are sums over fixed tiles, each relative to the tile's own maximum, combined in order; nothing depends on
// threads, on the batch, or on the width of the machine's vectors.
#pragma once

#include "core/nucleus.h"
#include "cpu/bracket.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "cpu/threshold.h"

namespace specdec::SPECDEC_ISA {

constexpr float kLeastFinite = -3.4028234663852886e38f;

struct RowStats {
  float row_max;
  double mass;  // sum of exp((z - row_max) / T); the number of +inf where row_max is +inf; 0 for an empty row
  bool nan_seen;
  // Of a row that was scanned with a bracket: how many values lie in it, collected in scratch.values, and the mass of
  // those above it. -1: there was none.
  int64_t inside;
  double above;
};

// A row whose first tile weighs this many times its maximum is flat: many tokens will be in its nucleus, and the scan
// looks for its threshold on the way.
constexpr float kFlat = 32.0f;

// Maximum of a tile lane by lane (each lane's is the maximum of every 16th token), and whether a NaN was seen.
template <class T>
SPECDEC_HD LanesF tile_max(const T* z, int64_t n, LanesM& nan) {
  LanesF m0(-kInf), m1(-kInf), m2(-kInf), m3(-kInf);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    LanesF a, b, c, d;
    load_two(z + i, a, b);
    load_two(z + i + 2 * kLanes, c, d);
    m0 = larger(a, m0);
    m1 = larger(b, m1);
    m2 = larger(c, m2);
    m3 = larger(d, m3);
    nan = nan | ((a != a) | (b != b)) | ((c != c) | (d != d));
  }
  for (; i < n; i += kLanes) {
    const LanesF a = i + kLanes <= n ? load(z + i) : load_partial(z + i, n - i, -kInf);
    m0 = larger(a, m0);
    nan = nan | (a != a);
  }
  return larger(larger(m0, m1), larger(m2, m3));
}

// Sum of 2^((z - reference) * scale) over a tile; `ahead` is fetched meanwhile, a line for each line read. With
// `kBracket` the terms of values from at.high up are also summed into `above`, and the values in [at.low, at.high) go
// to out[found..).
template <bool kBracket, class T>
SPECDEC_HD float tile_sum(const T* z, int64_t n, float reference, float scale, const T* ahead, const Bracket& at,
                          float& above, float* out, int64_t& found) {
  int64_t count = found;  // the reference would be stored each time
  const LanesF r(reference), c(scale), from(at.low), to(at.high), zero(0.0f);
  LanesF s0(0.0f), s1(0.0f), a0(0.0f), a1(0.0f);
  const auto take = [&](const LanesF& a, LanesF& sum, LanesF& high_sum) {
    const LanesF w = exp2_floor((a - r) * c);
    sum = sum + w;
    if (!kBracket) return;
    high_sum = high_sum + select(a >= to, w, zero);
    const uint32_t hit = bits_from(a, from) & ~bits_from(a, to);
    if (kParts > 1 && !hit) return;  // as in collect
    compress(out + count, a, hit);
    count += __builtin_popcount(hit);
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    __builtin_prefetch(ahead + i);
    __builtin_prefetch(ahead + i + kLanes);
    LanesF a, b;
    load_two(z + i, a, b);
    take(a, s0, a0);
    take(b, s1, a1);
  }
  for (; i < n; i += kLanes) take(i + kLanes <= n ? load(z + i) : load_partial(z + i, n - i, -kInf), s0, a0);
  if (kBracket) above = horizontal_sum(a0 + a1), found = count;
  return horizontal_sum(s0 + s1);
}

// Fills scratch.lane_max, tile_max, tile_sum and tile_above. top_p < 1 asks for a bracket of its threshold where the
// row is flat; scratch.values then holds what is inside.
template <class T>
SPECDEC_HD RowStats scan_row(const T* z, int64_t vocab, float scale, bool with_mass, float top_p, Scratch& scratch) {
  const int64_t tiles = (vocab + kTile - 1) / kTile;
  LanesM nan{};
  RowStats stats{-kInf, 0.0, false, -1, 0.0};
  Bracket at{-kInf, kInf, false};
  for (int64_t t = 0; t < tiles; ++t) {
    const T* tile = z + t * kTile;
    const int64_t n = vocab - t * kTile < kTile ? vocab - t * kTile : kTile;
    const LanesF lanes = tile_max(tile, n, nan);
    store(scratch.lane_max + t * kLanes, lanes);
    const float m = horizontal_max(lanes);
    scratch.tile_max[t] = m;
    stats.row_max = m > stats.row_max ? m : stats.row_max;
    if (!with_mass) continue;
    float& sum = scratch.tile_sum[t];
    float& above = scratch.tile_above[t];
    above = 0.0f;
    if (m == -kInf) {
      sum = 0.0f;
    } else if (m == kInf) {
      sum = 0.0f;
      for (int64_t i = 0; i < n; ++i) sum += load_one(tile + i) == kInf ? 1.0f : 0.0f;
    } else {
      if (!at.useful) sum = tile_sum<false>(tile, n, m, scale, tile + kTile, at, above, nullptr, stats.inside);
      if (t == 0 && top_p < 1.0f && sum > kFlat) {
        at = guess_bracket(z, vocab, scale, top_p);
        if (at.useful) stats.inside = 0;
      }
      if (at.useful) sum = tile_sum<true>(tile, n, m, scale, tile + kTile, at, above, scratch.values, stats.inside);
    }
  }
  stats.nan_seen = any(nan);
  for (int64_t t = 0; with_mass && t < tiles; ++t) {
    const float m = scratch.tile_max[t];
    if (m == -kInf || (stats.row_max == kInf && m < kInf)) continue;
    const double unit = exp2_neg(scaled(m, stats.row_max, scale));
    stats.mass += static_cast<double>(scratch.tile_sum[t]) * unit;
    stats.above += static_cast<double>(scratch.tile_above[t]) * unit;
  }
  return stats;
}

// The row's finite values from `low` up to scratch.values; returns how many. `kMany`: hits are common and
// unpredictable; where packing lanes is one instruction, that beats a branch.
template <bool kMany, class T>
SPECDEC_HD int64_t collect(const T* z, int64_t vocab, float low, Scratch& scratch) {
  const int64_t tiles = (vocab + kTile - 1) / kTile;
  const float floor = low > kLeastFinite ? low : kLeastFinite;
  const LanesF from(floor);
  float* const out = scratch.values;
  int64_t count = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    if (!(scratch.tile_max[t] >= floor)) continue;
    const T* tile = z + t * kTile;
    const int64_t n = vocab - t * kTile < kTile ? vocab - t * kTile : kTile;
    const auto take = [&](const LanesF& a) {
      const uint32_t hit = bits_from(a, from);
      if ((!kMany || kParts > 1) && !hit) return;
      compress(out + count, a, hit);
      count += __builtin_popcount(hit);
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) take(load(tile + i));
    if (i < n) take(load_partial(tile + i, n - i, -kInf));
  }
  return count;
}

// Of the n candidates keeps those below `high`, with their weights, in order; returns how many. The others' weights are
// summed into `above`.
SPECDEC_HD int64_t split_above(float high, int64_t n, float row_max, float scale, Scratch& scratch, double& above) {
  const LanesF to(high), m(row_max), c(scale), zero(0.0f);
  int64_t count = 0;
  above = 0.0;
  for (int64_t start = 0; start < n; start += kTile) {
    const int64_t end = start + kTile < n ? start + kTile : n;
    LanesF sum(0.0f);
    for (int64_t i = start; i < end; i += kLanes) {  // never writes past what it has read, or past the padding
      const LanesF a = i + kLanes <= end ? load(scratch.values + i) : load_partial(scratch.values + i, end - i, -kInf);
      const LanesF w = exp2_floor((a - m) * c);
      const uint32_t valid = end - i < kLanes ? (1u << (end - i)) - 1 : 0xffff, over = bits_from(a, to);
      sum = sum + select(a >= to, w, zero);
      compress(scratch.values + count, a, valid & ~over);
      compress(scratch.weights + count, w, valid & ~over);
      count += __builtin_popcount(valid & ~over);
    }
    above += horizontal_sum(sum);
  }
  return count;
}

struct Low {
  float value;
  bool certain;
};

// A value that the k-th largest of the row is not below, or -inf. For a k that the lane maxima reach, theirs is certain
// to be one; for a larger k every n-th bundle gives a guess, a few standard deviations low, that the caller has to
// check.
template <class T>
SPECDEC_HD Low low_for_count(const T* z, int64_t vocab, int64_t k, Scratch& scratch) {
  const int64_t tiles = (vocab + kTile - 1) / kTile, bundles = vocab / kLanes, stride = bundles / 256;
  int64_t n = finite_lane_maxima(tiles, scratch);
  if (k <= n || stride < 2) {
    fill(scratch.weights, n, 1.0f);
    return {find_threshold(scratch, n, static_cast<double>(k)).value, true};
  }
  n = 0;
  for (int64_t i = 0; i < bundles; i += stride, n += kLanes) {
    const LanesF a = load(z + i * kLanes), least(kLeastFinite);
    store(scratch.values + n, larger(a, least));  // a masked token sorts last
  }
  const double expected = static_cast<double>(k) / static_cast<double>(stride);
  fill(scratch.weights, n, 1.0f);
  const float guess = find_threshold(scratch, n, expected + 4.0 * __builtin_sqrt(expected) + 4.0).value;
  return {guess > kLeastFinite ? guess : -kInf, !(guess > kLeastFinite)};
}

// A value that the threshold of mass `goal` is not below: the better of two bounds. The lane maxima alone may hold that
// mass; and the tokens below row_max + T log((total - goal) / V) cannot hold what is left over.
SPECDEC_HD float low_for_mass(int64_t tiles, int64_t vocab, double goal, double total, float row_max, float scale,
                              Scratch& scratch) {
  float low = -kInf;
  const double left = (total - goal) / total;
  if (left > 1e-5) {
    const float t = log_pos(static_cast<float>((total - goal) / static_cast<double>(vocab))) * kLog2e;
    low = row_max + (t * 1.0001f - 0.01f) / scale - 1e-6f * (row_max < 0 ? -row_max : row_max);
  }
  const int64_t n = finite_lane_maxima(tiles, scratch);
  weigh(scratch.values, scratch.weights, n, row_max, scale);
  const float held = find_threshold(scratch, n, goal * 1.00001).value;
  return held > low ? held : low;
}

// Where the min-p condition p(x) >= min_p * max p begins, a little below it.
SPECDEC_HD float low_for_min_p(float log2_min_p, float row_max, float scale) {
  const float offset = log2_min_p / scale;
  const float low = row_max + offset;
  return low - (1e-5f * (offset < 0 ? -offset : offset) + 1e-6f * (row_max < 0 ? -row_max : row_max) + 1e-30f);
}

// Smallest collected value that min-p keeps.
SPECDEC_HD float min_p_cutoff(const Scratch& scratch, int64_t n, float log2_min_p, float row_max, float scale) {
  float least = row_max;
  for (int64_t i = 0; log2_min_p < 0.0f && i < n; ++i) {
    const float v = scratch.values[i];
    if (v < least && (v - row_max) * scale >= log2_min_p) least = v;
  }
  return least;
}

// Nucleus of one row; `status` gets kEmptyRow and kNanSeen.
template <class T>
Nucleus row_nucleus(const T* z, int64_t vocab, const Filter& filter, int32_t order, Scratch& scratch, int32_t& status) {
  const bool has_k = filter.top_k > 0 && filter.top_k < vocab;
  const bool has_p = filter.top_p < 1.0f;
  const bool has_m = filter.min_p > 0.0f;
  const bool p_alone = has_p && !has_k && !has_m;
  const RowStats stats = scan_row(z, vocab, filter.scale, !filter.greedy, p_alone ? filter.top_p : 1.0f, scratch);
  if (stats.nan_seen) status |= kNanSeen;
  const float row_max = stats.row_max;
  if (row_max == -kInf) {
    status |= kEmptyRow;
    return empty_nucleus();
  }
  if (filter.greedy) return {row_max, row_max, 0.0f};

  const bool filtered = has_k || has_p || has_m;
  if (!filtered || row_max == kInf) return {filtered ? kInf : -kInf, row_max, log_pos(static_cast<float>(stats.mass))};

  const int64_t tiles = (vocab + kTile - 1) / kTile;
  const float scale = filter.scale;
  const double goal = filter.top_p * stats.mass;  // of top-p alone
  // The cutoff where it is among the n candidates, and `above`, the mass of larger values, does not reach the goal yet.
  const auto in_bracket = [&](int64_t n, double above, Nucleus& found) {
    if (!(above < goal)) return false;
    copy_candidates(scratch, n, /*unit_weights=*/false);
    const float cutoff = find_threshold_of_copy(scratch, n, goal, above).value;
    if (cutoff == -kInf) return false;
    found = {cutoff, row_max, log_pos(static_cast<float>(above + mass_from(scratch, n, cutoff)))};
    return true;
  };
  Nucleus found;
  if (stats.inside >= 0) {
    weigh(scratch.values, scratch.weights, stats.inside, row_max, scale);
    if (in_bracket(stats.inside, stats.above, found)) return found;
  }
  const float log2_min_p = has_m ? log_pos(filter.min_p) * kLog2e : 0.0f;
  // Which filters shrink the distribution that top-p looks at.
  const bool k_first = has_k && order != kOrderJoint;
  const bool m_first = has_m && order == kOrderVllm;

  Low k_low = {-kInf, true};
  if (has_k) k_low = low_for_count(z, vocab, filter.top_k, scratch);
  float low = k_low.value;
  if (has_m && !(k_first && has_p && !m_first)) {
    const float m = low_for_min_p(log2_min_p, row_max, scale);
    low = m > low ? m : low;
  }
  if (has_p && !k_first && !m_first) {
    const float p = low_for_mass(tiles, vocab, goal, stats.mass, row_max, scale, scratch);
    low = p > low ? p : low;
  }
  if (p_alone) {
    const Bracket at = estimate_bracket(z, vocab, low, row_max, scale, stats.mass - goal);
    if (at.useful) {
      double above;
      const int64_t n =
          split_above(at.high, collect</*kMany=*/true>(z, vocab, at.low, scratch), row_max, scale, scratch, above);
      if (in_bracket(n, above, found)) return found;
    }
  }
  int64_t n = collect</*kMany=*/false>(z, vocab, low, scratch);
  if (!k_low.certain && n < filter.top_k && low == k_low.value) n = collect</*kMany=*/false>(z, vocab, -kInf, scratch);
  weigh(scratch.values, scratch.weights, n, row_max, scale);

  float cutoff = -kInf;
  if (has_k) {
    copy_candidates(scratch, n, /*unit_weights=*/true);
    cutoff = find_threshold_of_copy(scratch, n, static_cast<double>(filter.top_k)).value;
  }
  const float min_p_at = has_m ? min_p_cutoff(scratch, n, log2_min_p, row_max, scale) : -kInf;
  if (m_first && min_p_at > cutoff) cutoff = min_p_at;
  if (has_p) {
    const bool whole = !k_first && !m_first;
    const double wanted = whole ? goal : filter.top_p * mass_from(scratch, n, cutoff);
    copy_candidates(scratch, n, /*unit_weights=*/false);
    const float p = find_threshold_of_copy(scratch, n, wanted).value;
    cutoff = p > cutoff ? p : cutoff;
  }
  if (min_p_at > cutoff) cutoff = min_p_at;
  // A mass that rounds short of its goal keeps everything finite. (Fewer than k finite tokens leave the cutoff at
  // -inf.)
  if (has_p && cutoff == -kInf) cutoff = least_value(scratch, n);
  return {cutoff, row_max, log_pos(static_cast<float>(mass_from(scratch, n, cutoff)))};
}

}  // namespace specdec::SPECDEC_ISA
