// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) and the keys of every draw:
//   key = (seed low, seed high), counter = (index, position low, position high, stream | id << 8)
#pragma once

#include "core/config.h"

namespace specdec::SPECDEC_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

enum Stream : uint32_t { kStreamDraft = 0, kStreamAccept = 1, kStreamSample = 2 };

// Everything of a draw's key but the block index.
struct NoiseKey {
  uint32_t seed_lo, seed_hi, pos_lo, pos_hi, tag;
};

SPECDEC_HD NoiseKey make_key(int64_t seed, int64_t position, uint32_t stream, int64_t id) {
  const uint64_t s = static_cast<uint64_t>(seed), p = static_cast<uint64_t>(position);
  return {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32), static_cast<uint32_t>(p),
          static_cast<uint32_t>(p >> 32), stream | (static_cast<uint32_t>(id) << 8)};
}

SPECDEC_HD void philox_block(const NoiseKey& key, uint32_t index, uint32_t out[4]) {
  uint32_t c0 = index, c1 = key.pos_lo, c2 = key.pos_hi, c3 = key.tag, k0 = key.seed_lo, k1 = key.seed_hi;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0, p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// (word + 0.5) * 2^-32 rounded at each operation, at most 1 - 2^-24 (a word near 2^32 would round to 1).
SPECDEC_HD float uniform(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

SPECDEC_HD float accept_coin(int64_t seed, int64_t anchor, int64_t offset) {
  uint32_t words[4];
  philox_block(make_key(seed, anchor, kStreamAccept, offset), 0, words);
  return uniform(words[0]);
}

}  // namespace specdec::SPECDEC_ISA
