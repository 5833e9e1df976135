// Exponential race over a row: the winner is argmax of log w_v - log e_v. Tokens are taken in groups of 64 (16 Philox
// blocks); a group none of whose tokens can still win is skipped before any noise is made for it.
#pragma once

#include <type_traits>

#include "core/nucleus.h"
#include "core/philox.h"
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

// For tokens base..base + 63, base a multiple of 64.
SPECDEC_HD GroupUniforms group_uniforms(const NoiseKey& key, int64_t base) {
  constexpr uint32_t iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  NativeU words[4][kParts];
  const NativeU64 m0 = NativeU64{} + kPhiloxM0, m1 = NativeU64{} + kPhiloxM1;
  for (int part = 0; part < kParts; ++part) {
    NativeU c0, c1 = NativeU{} + key.pos_lo, c2 = NativeU{} + key.pos_hi, c3 = NativeU{} + key.tag;
    std::memcpy(&c0, iota + part * kNative, sizeof c0);
    c0 += static_cast<uint32_t>(base >> 2);
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

struct Winner {
  float score = -kInf;  // -inf: nothing has raced
  int64_t token = 0;
};

// `weights(base, n, floor, out)` fills out[0..64) with the log-weights of tokens base..base + n - 1 (-inf where a token
// does not race, and past n), and returns whether any is above `floor`.
template <class Weights>
SPECDEC_HD Winner race(int64_t vocab, const NoiseKey& key, const Weights& weights) {
  Winner best;
  float lw[kGroup], u[kGroup];
  for (int64_t base = 0; base < vocab; base += kGroup) {
    const int64_t n = vocab - base < kGroup ? vocab - base : kGroup;
    if (!weights(base, n, best.score - kMaxNoise, lw)) continue;
    const GroupUniforms noise = group_uniforms(key, base);
    // The smallest uniform bounds what the group can score, at the price of two logarithms instead of 128.
    if (best.score > -kInf && group_max(lw) - log_pos(exponential(smallest(noise))) + 1e-3f < best.score) continue;
    in_token_order(noise, u);
    LanesF top(-kInf);
    for (int part = 0; part < kGroupParts; ++part) {
      const LanesF w = load(lw + part * kLanes);
      const LanesF score = w - log_pos(exponential(load(u + part * kLanes)));
      store(lw + part * kLanes, score);
      top = larger(score, top);
    }
    const float m = horizontal_max(top);
    if (!(m > best.score)) continue;
    best.score = m;
    for (int i = 0; i < kGroup; ++i)
      if (lw[i] == m) {
        best.token = base + i;
        break;
      }
  }
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

  SPECDEC_HD bool operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
    if (z && !any_kept(z + base, n, p.nucleus.cutoff)) return false;
    LanesM hit{};
    for (int part = 0; part < kGroupParts; ++part) {
      const int64_t left = n - part * kLanes;
      const LanesF w = left > 0 ? p.log_weights(base + part * kLanes, left) : LanesF(-kInf);
      hit = hit | (w > LanesF(floor));
      store(out + part * kLanes, w);
    }
    return any(hit);
  }
};

// Log of max(0, p - q). No token can score above what p alone would give it, so q is read only where p is still in the
// race.
template <class T>
struct ResidualWeights {
  const Dist& p;
  const Dist& q;
  const T* z;

  SPECDEC_HD bool operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
    if (z && !any_kept(z + base, n, p.nucleus.cutoff)) return false;
    LanesF mine[kGroupParts];
    LanesM hit{};
    const float shift = p.kind == Kind::kLogits ? p.nucleus.log_mass : 0.0f;
    for (int part = 0; part < kGroupParts; ++part) {
      const int64_t left = n - part * kLanes;
      mine[part] = left > 0 ? p.log_weights(base + part * kLanes, left) : LanesF(-kInf);
      hit = hit | (mine[part] - LanesF(shift) > LanesF(floor));
    }
    if (!any(hit)) return false;
    for (int part = 0; part < kGroupParts; ++part) {
      LanesF w(-kInf);
      const int64_t left = n - part * kLanes;
      if (left > 0 && any(mine[part] > w)) {
        const LanesF r = p.probs(base + part * kLanes, left) - q.probs(base + part * kLanes, left);
        w = select(r > LanesF(0.0f), log_pos(larger(r, LanesF(kLeastNormal))), w);
      }
      store(out + part * kLanes, w);
    }
    return true;
  }
};

// Races the tokens of p, or of max(0, p - q) where q is given and leaves anything.
inline Winner race_dist(const Dist& p, const Dist* q, int64_t vocab, const NoiseKey& key) {
  return with_row(*p.source.view, p.source.row, [&](const auto* row) {
    const auto* z = p.kind == Kind::kLogits && !p.source.map ? row : nullptr;
    using T = std::remove_const_t<std::remove_pointer_t<decltype(row)>>;
    if (q) {
      const Winner left = race(vocab, key, ResidualWeights<T>{p, *q, z});
      if (left.score > -kInf) return left;
    }
    return race(vocab, key, DistWeights<T>{p, z});
  });
}

}  // namespace specdec::SPECDEC_ISA
