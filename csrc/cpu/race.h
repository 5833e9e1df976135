// Exponential race over a row: the winner is argmax of log w_v - log e_v. Tokens are taken in groups of 64 (16 Philox blocks);
// a group none of whose tokens can still win is skipped before any noise is made for it.
#pragma once

#include "core/nucleus.h"
#include "core/philox.h"
#include "cpu/dist.h"
#include "cpu/lanes.h"

namespace specdec::SPECDEC_ISA {

constexpr int kGroup = 64;
constexpr int kGroupParts = kGroup / kLanes;
// -log e_v is at most this: u >= 2^-33, so e >= 2^-33 = exp(-22.87).
constexpr float kMaxNoise = 22.9f;

typedef uint32_t NativeU __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef uint64_t NativeU64 __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));

// High and low words of a * b per lane: even and odd lanes are multiplied as 64-bit lanes.
SPECDEC_HD void multiply(NativeU a, uint32_t b, NativeU& high, NativeU& low) {
  const NativeU64 mask = NativeU64{} + 0xffffffffull;
  const NativeU64 even = ((NativeU64)a & mask) * (NativeU64{} + b), odd = ((NativeU64)a >> 32) * (NativeU64{} + b);
  high = (NativeU)((even >> 32) | (odd & ~mask));
  low = (NativeU)((even & mask) | (odd << 32));
}

// Uniforms of tokens base..base + 63 (base a multiple of 64), in token order.
SPECDEC_HD void group_uniforms(const NoiseKey& key, int64_t base, float u[kGroup]) {
  uint32_t words[4][kLanes];
  for (int part = 0; part < kParts; ++part) {
    NativeU c0, c1, c2, c3;
    for (int i = 0; i < kNative; ++i) {
      c0[i] = static_cast<uint32_t>(base >> 2) + part * kNative + i;
      c1[i] = key.pos_lo, c2[i] = key.pos_hi, c3[i] = key.tag;
    }
    uint32_t k0 = key.seed_lo, k1 = key.seed_hi;
    for (int round = 0; round < 10; ++round) {
      NativeU h0, l0, h1, l1;
      multiply(c0, kPhiloxM0, h0, l0);
      multiply(c2, kPhiloxM1, h1, l1);
      c0 = h1 ^ c1 ^ k0;
      c2 = h0 ^ c3 ^ k1;
      c1 = l1;
      c3 = l0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    std::memcpy(words[0] + part * kNative, &c0, sizeof c0);
    std::memcpy(words[1] + part * kNative, &c1, sizeof c1);
    std::memcpy(words[2] + part * kNative, &c2, sizeof c2);
    std::memcpy(words[3] + part * kNative, &c3, sizeof c3);
  }
  for (int block = 0; block < kLanes; ++block)
    for (int lane = 0; lane < 4; ++lane) u[4 * block + lane] = uniform(words[lane][block]);
}

struct Winner {
  float score = -kInf;  // -inf: nothing has raced
  int64_t token = 0;
};

// `weights(base, n, floor, out)` fills out[0..64) with the log-weights of tokens base..base + n - 1 (-inf where a token does
// not race, and past n), and returns whether any is above `floor`.
template <class Weights>
SPECDEC_HD Winner race(int64_t vocab, const NoiseKey& key, const Weights& weights) {
  Winner best;
  float lw[kGroup], u[kGroup];
  for (int64_t base = 0; base < vocab; base += kGroup) {
    const int64_t n = vocab - base < kGroup ? vocab - base : kGroup;
    if (!weights(base, n, best.score - kMaxNoise, lw)) continue;
    group_uniforms(key, base, u);
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

// Log-weights of a distribution.
struct DistWeights {
  const Dist& p;

  SPECDEC_HD bool operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
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

// Log of max(0, p - q). No token can score above what p alone would give it, so q is read only where p is still in the race.
struct ResidualWeights {
  const Dist& p;
  const Dist& q;

  SPECDEC_HD bool operator()(int64_t base, int64_t n, float floor, float out[kGroup]) const {
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

}  // namespace specdec::SPECDEC_ISA
