// markov_step up to its draw: base + W1[token] W2^T, rounded to the dtype of the rows.
//
// A logit's product is summed in sixteen lanes along the rank and then over the lanes by halves, whatever else is
// computed beside it: the same bits for any number of rows, any thread and any instruction set.
#pragma once

#include "cpu/dist.h"
#include "cpu/lanes.h"

namespace specdec::SPECDEC_ISA {

// Products that are summed side by side, kMarkovRows rows by kMarkovColumns tokens: as many as the registers hold.
constexpr int kMarkovRows = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
constexpr int kMarkovColumns = kParts == 1 ? 4 : 2;

// Lane sums of a[i] . b[j], for kRows rows a and kColumns rows b of `rank` values, to out[i][j]; what lies `ahead` of b
// is fetched meanwhile, a line for each line read.
template <int kRows, int kColumns, class W>
SPECDEC_HD void lane_sums(const W* const a[], const W* const b[], int64_t rank, int64_t ahead,
                          float (*const out[])[kLanes]) {
  LanesF sum[kRows][kColumns];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kColumns; ++j) sum[i][j] = LanesF(0.0f);
  const auto add = [&](const LanesF x[kRows], const LanesF& y, int j) {
    for (int i = 0; i < kRows; ++i) sum[i][j] = sum[i][j] + x[i] * y;
  };
  int64_t k = 0;
  for (; k + 2 * kLanes <= rank; k += 2 * kLanes) {
    LanesF x0[kRows], x1[kRows], y0, y1;
    for (int i = 0; i < kRows; ++i) load_two(a[i] + k, x0[i], x1[i]);
    for (int j = 0; j < kColumns; ++j) {
      for (size_t line = 0; line < sizeof(W) * 2 * kLanes; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(b[j] + k + ahead) + line);
      load_two(b[j] + k, y0, y1);
      add(x0, y0, j);
      add(x1, y1, j);
    }
  }
  for (; k < rank; k += kLanes) {
    const int64_t n = rank - k;
    const auto some = [&](const W* p) { return n >= kLanes ? load(p + k) : load_partial(p + k, n, 0.0f); };
    LanesF x[kRows];
    for (int i = 0; i < kRows; ++i) x[i] = some(a[i]);
    for (int j = 0; j < kColumns; ++j) add(x, some(b[j]), j);
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kColumns; ++j) store(out[i][j], sum[i][j]);
}

// The sum of each of sixteen rows of lanes, in the order of horizontal_sum, side by side. Out of line and with
// a buffer for each step the loops are vectorised; inside its caller GCC takes the lanes apart one by one.
inline __attribute__((noinline)) void sums_of(const float lanes[kLanes][kLanes], float sums[kLanes]) {
  float eights[kLanes * 8], fours[kLanes * 4], twos[kLanes * 2];
  for (int j = 0; j < kLanes; ++j)
    for (int i = 0; i < 8; ++i) eights[8 * j + i] = lanes[j][i] + lanes[j][i + 8];
  for (int j = 0; j < kLanes; ++j)
    for (int i = 0; i < 4; ++i) fours[4 * j + i] = eights[8 * j + i] + eights[8 * j + i + 4];
  for (int j = 0; j < kLanes; ++j)
    for (int i = 0; i < 2; ++i) twos[2 * j + i] = fours[4 * j + i] + fours[4 * j + i + 2];
  for (int j = 0; j < kLanes; ++j) sums[j] = twos[2 * j] + twos[2 * j + 1];
}

// Rows n..n + kRows - 1, tokens v..v + count - 1, at most sixteen.
template <int kRows, class Z, class W>
SPECDEC_HD void markov_block(const MarkovArgs& a, int64_t n, int64_t v, int64_t count) {
  const int64_t rank = a.w1.width;
  const W *head[kRows], *column[kMarkovColumns];
  bool known[kRows];
  float lanes[kRows][kLanes][kLanes];
  for (int i = 0; i < kRows; ++i) {
    const int64_t token = a.tokens[n + i];
    known[i] = token >= 0 && token < a.w1.rows;
    head[i] = static_cast<const W*>(a.w1.data) + (known[i] ? token : 0) * a.w1.stride;
  }
  for (int j = 0; j < kLanes; j += kMarkovColumns) {
    float (*out[kRows])[kLanes];
    for (int i = 0; i < kRows; ++i) out[i] = lanes[i] + j;
    for (int c = 0; c < kMarkovColumns; ++c) {  // past the row's end its last token again
      const int64_t at = j + c < count ? j + c : count - 1;
      column[c] = static_cast<const W*>(a.w2.data) + (v + at) * a.w2.stride;
    }
    lane_sums<kRows, kMarkovColumns>(head, column, rank, kLanes * a.w2.stride, out);
  }
  for (int i = 0; i < kRows; ++i) {
    const Z* base = static_cast<const Z*>(a.base.data) + (n + i) * a.base.stride + v;
    Z* logits = static_cast<Z*>(const_cast<void*>(a.logits.data)) + (n + i) * a.logits.stride + v;
    LanesF z = count == kLanes ? load(base) : load_partial(base, count, 0.0f);
    if (known[i]) {
      float bias[kLanes];
      sums_of(lanes[i], bias);
      z = z + load(bias);
    }
    Z rounded[kLanes];
    store(rounded, z);
    std::memcpy(logits, rounded, count * sizeof(Z));
  }
}

template <class Z, class W>
void markov_tile(const MarkovArgs& a, int64_t tile) {
  const int64_t end = (tile + 1) * kMarkovTile < a.base.width ? (tile + 1) * kMarkovTile : a.base.width;
  for (int64_t v = tile * kMarkovTile; v < end; v += kLanes) {
    const int64_t count = end - v < kLanes ? end - v : kLanes;
    int64_t n = 0;
    for (; n + kMarkovRows <= a.base.rows; n += kMarkovRows) markov_block<kMarkovRows, Z, W>(a, n, v, count);
    for (; n < a.base.rows; ++n) markov_block<1, Z, W>(a, n, v, count);
  }
}

inline void markov_logits(const MarkovArgs& a, int64_t tile) {
  const auto with_logits = [&](auto z) {
    using Z = decltype(z);
    switch (a.w1.dtype) {
      case DType::kBFloat16:
        return markov_tile<Z, BFloat16>(a, tile);
      case DType::kFloat16:
        return markov_tile<Z, Half>(a, tile);
      default:
        return markov_tile<Z, float>(a, tile);
    }
  };
  switch (a.base.dtype) {
    case DType::kBFloat16:
      return with_logits(BFloat16{});
    case DType::kFloat16:
      return with_logits(Half{});
    default:
      return with_logits(0.0f);
  }
}

}  // namespace specdec::SPECDEC_ISA
