// Exponential race over a row: the winner is argmax of log w_v - log e_v. Tokens are taken in groups of 64 (16 Philox
// blocks); a group none of whose tokens can still win is skipped before any noise is made for it.
#pragma once

#include <type_traits>

#include "core/nucleus.h"
#include "core/philox.h"
#include "cpu/args.h"
#include "cpu/dist.h"
#include "cpu/lanes.h"

namespace specdec::SPECDEC_ISA {

constexpr int kGroup = 64;
constexpr int kGroupParts = kGroup / kLanes;
// -log e_v is at most this: u >= 2^-33, so e >= 2^-33 = exp(-22.87).
constexpr float kMaxNoise = 22.9f;

// High and low words of a * b per lane.
SPECDEC_HD void multiply(NativeU a, NativeU64 b, NativeU& high, NativeU& low) {
  const NativeU64 low_half = NativeU64{} + 0xffffffffull;
  const NativeU64 even = multiply_even((NativeU64)a, b), odd = multiply_even((NativeU64)a >> 32, b);
  high = (NativeU)((even >> 32) | (odd & ~low_half));
  low = (NativeU)((even & low_half) | (odd << 32));
}

// Uniforms of 64 consecutive tokens: u[w] holds, over its 16 lanes, word w of each of the 16 blocks, so token 4 * lane
// + w.
struct GroupUniforms {
  LanesF u[4];
};

SPECDEC_HD LanesF uniforms(const NativeU words[kParts]) {
  LanesF u;
  for (int l = 0; l < kParts; ++l) u.v[l] = __builtin_convertvector(words[l], NativeF);
  u = (u + LanesF(0.5f)) * LanesF(0x1p-32f);
  return select(LanesF(0x1.fffffep-1f) > u, u, LanesF(0x1.fffffep-1f));
}

// Philox blocks of sixteen indices; words[w] is word w of each.
SPECDEC_HD void philox_lanes(const NoiseKey& key, const uint32_t index[kLanes], NativeU words[4][kParts]) {
  const NativeU64 m0 = NativeU64{} + kPhiloxM0, m1 = NativeU64{} + kPhiloxM1;
  for (int part = 0; part < kParts; ++part) {
    NativeU c0, c1 = NativeU{} + key.pos_lo, c2 = NativeU{} + key.pos_hi, c3 = NativeU{} + key.tag;
    std::memcpy(&c0, index + part * kNative, sizeof c0);
    uint32_t k0 = key.seed_lo, k1 = key.seed_hi;
    for (int round = 0; round < 10; ++round) {
      NativeU h0, l0, h1, l1;
      multiply(c0, m0, h0, l0);
      multiply(c2, m1, h1, l1);
      c0 = h1 ^ c1 ^ k0;
      c2 = h0 ^ c3 ^ k1;
      c1 = l1;
      c3 = l0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    words[0][part] = c0, words[1][part] = c1, words[2][part] = c2, words[3][part] = c3;
  }
}

// For tokens base..base + 63, base a multiple of 64.
SPECDEC_HD GroupUniforms group_uniforms(const NoiseKey& key, int64_t base) {
  uint32_t index[kLanes];
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint32_t>(base >> 2) + i;
  NativeU words[4][kParts];
  philox_lanes(key, index, words);
  return {{uniforms(words[0]), uniforms(words[1]), uniforms(words[2]), uniforms(words[3])}};
}

SPECDEC_HD float smallest(const GroupUniforms& g) {
  const LanesF zero(0.0f);
  return 0.0f - horizontal_max(larger(larger(zero - g.u[0], zero - g.u[1]), larger(zero - g.u[2], zero - g.u[3])));
}

SPECDEC_HD void in_token_order(const GroupUniforms& g, float out[kGroup]) {
  float words[4][kLanes];
  for (int w = 0; w < 4; ++w) store(words[w], g.u[w]);
  for (int block = 0; block < kLanes; ++block)
    for (int w = 0; w < 4; ++w) out[4 * block + w] = words[w][block];
}

SPECDEC_HD float group_max(const float x[kGroup]) {
  LanesF m(-kInf);
  for (int part = 0; part < kGroupParts; ++part) m = larger(load(x + part * kLanes), m);
  return horizontal_max(m);
}

// Uniforms of sixteen tokens anywhere in the vocabulary, a block each.
SPECDEC_HD LanesF scattered_uniforms(const NoiseKey& key, const int32_t tokens[kLanes]) {
  NativeU words[4][kParts];
  uint32_t index[kLanes];
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint32_t>(tokens[i]) >> 2;
  philox_lanes(key, index, words);
  LanesF u = uniforms(words[0]);
  LanesI lane;
  for (int l = 0; l < kParts; ++l) {
    NativeI t;
    std::memcpy(&t, tokens + l * kNative, sizeof t);
    lane.v[l] = t & 3;
  }
  for (int w = 1; w < 4; ++w) u = select(lane == LanesI(w), uniforms(words[w]), u);
  return u;
}

struct Winner {
  float score = -kInf;  // -inf: nothing has raced
  int64_t token = 0;

  SPECDEC_HD float bound() const { return score; }  // what a token has to beat
  SPECDEC_HD void meet(float s, int64_t t) {        // the larger score, on a tie the lower id
    if (s > score || (s == score && s > -kInf && t < token)) score = s, token = t;
  }
  // The scores of 64 tokens from `base` on, and their maximum.
  SPECDEC_HD void meet_group(const float scores[kGroup], float most, int64_t base) {
    for (int i = 0; i < kGroup; ++i)
      if (scores[i] == most) return meet(most, base + i);
  }
};

// The first `wanted` of a race, in order.
struct Winners {
  float score[kMaxSamples];
  int64_t token[kMaxSamples];
  int count = 0, wanted = 0;

  SPECDEC_HD float bound() const { return count < wanted ? -kInf : score[count - 1]; }
  SPECDEC_HD void meet(float s, int64_t t) {
    if (!(s > -kInf)) return;
    const auto before = [&](int i) { return score[i] > s || (score[i] == s && token[i] < t); };
    if (count == wanted && before(count - 1)) return;
    int i = count < wanted ? count++ : count - 1;
    for (; i > 0 && !before(i - 1); --i) score[i] = score[i - 1], token[i] = token[i - 1];
    score[i] = s, token[i] = t;
  }
  SPECDEC_HD void meet_group(const float scores[kGroup], float, int64_t base) {
    for (int i = 0; i < kGroup; ++i)
      if (scores[i] >= bound()) meet(scores[i], base + i);
  }
};

// A token of log-weight `weight` can only win with a uniform up to this: e = -log1p(-u) >= u, so its score is at most
// weight - log u. One exponential for a group instead of two logarithms for each of its tokens; the slack covers
// rounding.
SPECDEC_HD float winning_uniform(float weight, float best) {
  const float t = (weight - best) * kLog2e;
  return t < 0.0f ? exp2_floor(t) * 1.001f : 1.0f;
}

// Kept tokens that stand alone are gathered until there are sixteen of them, so that noise is made for tokens that
// race.
struct Pending {
  int32_t token[kLanes] = {};
  float weight[kLanes];
  int count = 0;

  template <class Best>
  SPECDEC_HD void flush(const NoiseKey& key, Best& best) {
    if (!count) return;
    for (int i = count; i < kLanes; ++i) weight[i] = -kInf;
    const LanesF w = load(weight), u = scattered_uniforms(key, token);
    const float most = horizontal_max(w), least = 0.0f - horizontal_max(LanesF(0.0f) - u);
    count = 0;
    if (least > winning_uniform(most, best.bound())) return;
    float score[kLanes];
    store(score, w - log_pos(exponential(u)));
    for (int i = 0; i < kLanes; ++i) best.meet(score[i], token[i]);
  }
};

constexpr int kDense = 12;  // racing tokens of a group from which its blocks are worth making whole

// `weights(base, n, floor, out)` fills out[0..64) with the log-weights of tokens base..base + n - 1 (-inf where a token
// does not race, and past n), and returns a bit for each that is above `floor`; where it returns 0, `out` may be left
// as it was.
template <class Weights, class Best = Winner>
SPECDEC_HD Best race(int64_t vocab, const NoiseKey& key, const Weights& weights, Best best = {}) {
  Pending pending;
  float lw[kGroup], u[kGroup];
  for (int64_t base = 0; base < vocab; base += kGroup) {
    const int64_t n = vocab - base < kGroup ? vocab - base : kGroup;
    uint64_t racing = weights(base, n, best.bound() - kMaxNoise, lw);
    if (!racing) continue;
    if (__builtin_popcountll(racing) < kDense) {
      for (; racing; racing &= racing - 1) {
        const int i = __builtin_ctzll(racing);
        pending.token[pending.count] = static_cast<int32_t>(base + i);
        pending.weight[pending.count] = lw[i];
        if (++pending.count == kLanes) pending.flush(key, best);
      }
      continue;
    }
    const GroupUniforms noise = group_uniforms(key, base);
    if (smallest(noise) > winning_uniform(group_max(lw), best.bound())) continue;
    in_token_order(noise, u);
    LanesF top(-kInf);
    for (int part = 0; part < kGroupParts; ++part) {
      const LanesF score = load(lw + part * kLanes) - log_pos(exponential(load(u + part * kLanes)));
      store(lw + part * kLanes, score);
      top = larger(score, top);
    }
    const float m = horizontal_max(top);
    if (!(m < best.bound())) best.meet_group(lw, m, base);
  }
  pending.flush(key, best);
  return best;
}

// Whether any of the n <= 64 logits at z reaches the cutoff.
template <class T>
SPECDEC_HD bool any_kept(const T* z, int64_t n, float cutoff) {
  const LanesF bound(cutoff);
  if (n == kGroup)
    return any(((load(z) >= bound) | (load(z + kLanes) >= bound)) |
               ((load(z + 2 * kLanes) >= bound) | (load(z + 3 * kLanes) >= bound)));
  for (int64_t i = 0; i < n; ++i)
    if (load_one(z + i) >= cutoff) return true;
  return false;
}

// Log-weights of a distribution. `z` is its row where token v is column v of filtered logits, else null: groups outside
// the nucleus are then passed over with a comparison.
template <class T>
struct DistWeights {
  const Dist& p;
  const T* z;

  SPECDEC_HD uint64_t operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
    if (z && !any_kept(z + base, n, p.nucleus.cutoff)) return 0;
    uint64_t racing = 0;
    for (int part = 0; part < kGroupParts; ++part) {
      const int64_t left = n - part * kLanes;
      const LanesF w = left > 0 ? p.log_weights(base + part * kLanes, left) : LanesF(-kInf);
      racing |= static_cast<uint64_t>(bits(w > LanesF(floor))) << (part * kLanes);
      store(out + part * kLanes, w);
    }
    return racing;
  }
};

// Log of max(0, weight * p - q), weight <= 1. No token can score above what p alone would give it, so q is read only
// where p is still in the race.
template <class T>
struct ResidualWeights {
  const Dist& p;
  const Dist& q;
  const T* z;
  float weight;

  SPECDEC_HD uint64_t operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
    if (z && !any_kept(z + base, n, p.nucleus.cutoff)) return 0;
    LanesF mine[kGroupParts];
    LanesM hit{};
    const float shift = p.kind == Kind::kLogits ? p.nucleus.log_mass : 0.0f;
    for (int part = 0; part < kGroupParts; ++part) {
      const int64_t left = n - part * kLanes;
      mine[part] = left > 0 ? p.log_weights(base + part * kLanes, left) : LanesF(-kInf);
      hit = hit | (mine[part] - LanesF(shift) > LanesF(floor));
    }
    if (!any(hit)) return 0;
    uint64_t racing = 0;
    for (int part = 0; part < kGroupParts; ++part) {
      LanesF w(-kInf);
      const int64_t left = n - part * kLanes;
      if (left > 0 && any(mine[part] > w)) {
        const LanesF r = LanesF(weight) * p.probs(base + part * kLanes, left) - q.probs(base + part * kLanes, left);
        w = select(r > LanesF(0.0f), log_pos(larger(r, LanesF(kLeastNormal))), w);
      }
      racing |= static_cast<uint64_t>(bits(w > LanesF(floor))) << (part * kLanes);
      store(out + part * kLanes, w);
    }
    return racing;
  }
};

// Tokens that do not race, in ascending order.
struct Excluded {
  const int32_t* tokens = nullptr;
  int64_t count = 0;
};

template <class Weights>
struct WeightsWithout {
  const Weights& weights;
  Excluded excluded;
  mutable int64_t at = 0;

  SPECDEC_HD uint64_t operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
    uint64_t racing = weights(base, n, floor, out);
    for (; at < excluded.count && excluded.tokens[at] < base + n; ++at) {
      const int64_t i = excluded.tokens[at] - base;
      if (i < 0 || !racing) continue;
      racing &= ~(uint64_t{1} << i);
      out[i] = -kInf;
    }
    return racing;
  }
};

// Races the tokens of p, or of max(0, weight * p - q) where q is given and leaves anything. Where all that is left is
// excluded, nothing is.
inline Winner race_dist(const Dist& p, const Dist* q, float weight, int64_t vocab, const NoiseKey& key,
                        Excluded excluded = {}) {
  return with_row(*p.source.view, p.source.row, [&](const auto* row) {
    const auto* z = p.kind == Kind::kLogits && !p.source.map ? row : nullptr;
    using T = std::remove_const_t<std::remove_pointer_t<decltype(row)>>;
    const DistWeights<T> all{p, z};
    Winner left;
    if (q) {
      const ResidualWeights<T> rest{p, *q, z, weight};
      left = excluded.count ? race(vocab, key, WeightsWithout<ResidualWeights<T>>{rest, excluded})
                            : race(vocab, key, rest);
    } else if (excluded.count) {
      left = race(vocab, key, WeightsWithout<DistWeights<T>>{all, excluded});
    }
    return left.score > -kInf ? left : race(vocab, key, all);
  });
}

inline Winners race_several(const Dist& p, int64_t vocab, const NoiseKey& key, const Winners& best) {
  return with_row(*p.source.view, p.source.row, [&](const auto* row) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(row)>>;
    return race(vocab, key, DistWeights<T>{p, p.source.map ? nullptr : row}, best);
  });
}

}  // namespace specdec::SPECDEC_ISA
