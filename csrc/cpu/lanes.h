// Sixteen lanes of float or int32 in native vectors of the instruction set being compiled. Results do not depend on the
// native width: every operation is lane by lane, and a reduction over lanes has one order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/config.h"
#include "core/numerics.h"

#ifndef SPECDEC_VECTOR_BYTES
#define SPECDEC_VECTOR_BYTES 16
#endif

namespace specdec::SPECDEC_ISA {

constexpr int kLanes = 16;
constexpr int kNative = SPECDEC_VECTOR_BYTES / 4;
constexpr int kParts = kLanes / kNative;

typedef float NativeF __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef int32_t NativeI __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef uint16_t NativeU16 __attribute__((vector_size(SPECDEC_VECTOR_BYTES / 2)));

#define SPECDEC_EACH for (int l = 0; l < kParts; ++l)

struct LanesI {
  NativeI v[kParts];
  LanesI() = default;
  SPECDEC_HD LanesI(int32_t x) { SPECDEC_EACH v[l] = NativeI{} + x; }
};

struct LanesF {
  NativeF v[kParts];
  LanesF() = default;
  SPECDEC_HD LanesF(float x) { SPECDEC_EACH v[l] = NativeF{} + x; }
};

// Comparison result: all bits of a lane set or clear.
struct LanesM {
  NativeI v[kParts];
};

#define SPECDEC_LANES_BINARY(op)                                    \
  SPECDEC_HD LanesF operator op(const LanesF& a, const LanesF& b) { \
    LanesF r;                                                       \
    SPECDEC_EACH r.v[l] = a.v[l] op b.v[l];                         \
    return r;                                                       \
  }
SPECDEC_LANES_BINARY(+)
SPECDEC_LANES_BINARY(-)
SPECDEC_LANES_BINARY(*)
SPECDEC_LANES_BINARY(/)
#undef SPECDEC_LANES_BINARY

#define SPECDEC_LANES_COMPARE(op)                                   \
  SPECDEC_HD LanesM operator op(const LanesF& a, const LanesF& b) { \
    LanesM r;                                                       \
    SPECDEC_EACH r.v[l] = a.v[l] op b.v[l];                         \
    return r;                                                       \
  }
SPECDEC_LANES_COMPARE(>)
SPECDEC_LANES_COMPARE(>=)
SPECDEC_LANES_COMPARE(==)
SPECDEC_LANES_COMPARE(!=)
#undef SPECDEC_LANES_COMPARE

SPECDEC_HD LanesI operator+(const LanesI& a, const LanesI& b) {
  LanesI r;
  SPECDEC_EACH r.v[l] = a.v[l] + b.v[l];
  return r;
}
SPECDEC_HD LanesI operator-(const LanesI& a, const LanesI& b) {
  LanesI r;
  SPECDEC_EACH r.v[l] = a.v[l] - b.v[l];
  return r;
}
SPECDEC_HD LanesI operator&(const LanesI& a, const LanesI& b) {
  LanesI r;
  SPECDEC_EACH r.v[l] = a.v[l] & b.v[l];
  return r;
}
SPECDEC_HD LanesM operator==(const LanesI& a, const LanesI& b) {
  LanesM r;
  SPECDEC_EACH r.v[l] = a.v[l] == b.v[l];
  return r;
}
SPECDEC_HD LanesM operator|(const LanesM& a, const LanesM& b) {
  LanesM r;
  SPECDEC_EACH r.v[l] = a.v[l] | b.v[l];
  return r;
}
SPECDEC_HD LanesM operator&(const LanesM& a, const LanesM& b) {
  LanesM r;
  SPECDEC_EACH r.v[l] = a.v[l] & b.v[l];
  return r;
}

SPECDEC_HD LanesF select(const LanesM& m, const LanesF& a, const LanesF& b) {
  LanesF r;
  SPECDEC_EACH r.v[l] = m.v[l] ? a.v[l] : b.v[l];
  return r;
}
SPECDEC_HD LanesI as_int(const LanesF& a) {
  LanesI r;
  SPECDEC_EACH r.v[l] = (NativeI)a.v[l];
  return r;
}
SPECDEC_HD LanesF as_float(const LanesI& a) {
  LanesF r;
  SPECDEC_EACH r.v[l] = (NativeF)a.v[l];
  return r;
}
SPECDEC_HD LanesI shift_left(const LanesI& a, int n) {
  LanesI r;
  SPECDEC_EACH r.v[l] = a.v[l] << n;
  return r;
}
SPECDEC_HD LanesI shift_right(const LanesI& a, int n) {
  LanesI r;
  SPECDEC_EACH r.v[l] = a.v[l] >> n;
  return r;
}
SPECDEC_HD LanesF to_float(const LanesI& a) {
  LanesF r;
  SPECDEC_EACH r.v[l] = __builtin_convertvector(a.v[l], NativeF);
  return r;
}
SPECDEC_HD LanesI to_int(const LanesF& a) {
  LanesI r;
  SPECDEC_EACH r.v[l] = __builtin_convertvector(a.v[l], NativeI);
  return r;
}

// The larger of the two; b where a is NaN.
SPECDEC_HD LanesF larger(const LanesF& a, const LanesF& b) {
#if SPECDEC_VECTOR_BYTES == 64
  LanesF r;  // one instruction, which the compiler does not always find
  r.v[0] = (NativeF)_mm512_max_ps((__m512)a.v[0], (__m512)b.v[0]);
  return r;
#else
  return select(a > b, a, b);
#endif
}

SPECDEC_HD LanesF load(const float* p) {
  LanesF r;
  SPECDEC_EACH std::memcpy(&r.v[l], p + l * kNative, sizeof(NativeF));
  return r;
}
SPECDEC_HD void store(float* p, const LanesF& a) {
  SPECDEC_EACH std::memcpy(p + l * kNative, &a.v[l], sizeof(NativeF));
}
SPECDEC_HD void store(int32_t* p, const LanesI& a) {
  SPECDEC_EACH std::memcpy(p + l * kNative, &a.v[l], sizeof(NativeI));
}

// The operations that vector types cannot say: a mask as bits (lane 0 lowest), the masked lanes moved together,
// and the 64-bit products of the even 32-bit lanes.
typedef uint32_t NativeU __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef uint64_t NativeU64 __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));

#if SPECDEC_VECTOR_BYTES == 64
SPECDEC_HD NativeU64 multiply_even(NativeU64 a, NativeU64 b) {
  return (NativeU64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
SPECDEC_HD uint32_t bits(const LanesM& m) { return _mm512_movepi32_mask((__m512i)m.v[0]); }
// bits(a >= b), without a detour through a mask of vector width.
SPECDEC_HD uint32_t bits_from(const LanesF& a, const LanesF& b) {
  return _mm512_cmp_ps_mask((__m512)a.v[0], (__m512)b.v[0], _CMP_GE_OQ);
}
SPECDEC_HD void compress(float* out, const LanesF& a, uint32_t mask) {
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), (__m512)a.v[0]));
}
#else
#if SPECDEC_VECTOR_BYTES == 32
SPECDEC_HD NativeU64 multiply_even(NativeU64 a, NativeU64 b) {
  return (NativeU64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
SPECDEC_HD uint32_t bits(const LanesM& m) {
  return _mm256_movemask_ps((__m256)m.v[0]) | static_cast<uint32_t>(_mm256_movemask_ps((__m256)m.v[1])) << 8;
}
#elif defined(__SSE2__)
SPECDEC_HD NativeU64 multiply_even(NativeU64 a, NativeU64 b) {
  return (NativeU64)_mm_mul_epu32((__m128i)a, (__m128i)b);
}
SPECDEC_HD uint32_t bits(const LanesM& m) {
  uint32_t r = 0;
  SPECDEC_EACH r |= static_cast<uint32_t>(_mm_movemask_ps((__m128)m.v[l])) << (l * kNative);
  return r;
}
#else
SPECDEC_HD NativeU64 multiply_even(NativeU64 a, NativeU64 b) { return (a & 0xffffffffull) * (b & 0xffffffffull); }
SPECDEC_HD uint32_t bits(const LanesM& m) {
  int32_t x[kLanes];
  SPECDEC_EACH std::memcpy(x + l * kNative, &m.v[l], sizeof(NativeI));
  uint32_t r = 0;
  for (int i = 0; i < kLanes; ++i) r |= static_cast<uint32_t>(x[i] & 1) << i;
  return r;
}
#endif
SPECDEC_HD uint32_t bits_from(const LanesF& a, const LanesF& b) { return bits(a >= b); }
SPECDEC_HD void compress(float* out, const LanesF& a, uint32_t mask) {
  float x[kLanes];
  store(x, a);
  for (; mask; mask &= mask - 1) *out++ = x[__builtin_ctz(mask)];
}
#endif

SPECDEC_HD bool any(const LanesM& m) {
  LanesM o = m;
  for (int l = 1; l < kParts; ++l) o.v[0] |= m.v[l];
  for (int l = 1; l < kParts; ++l) o.v[l] = o.v[0];
  return bits(o) != 0;
}

SPECDEC_HD float horizontal_max(const LanesF& a) {
  float x[kLanes];
  store(x, a);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
  return x[0];
}
SPECDEC_HD float horizontal_sum(const LanesF& a) {
  float x[kLanes];
  store(x, a);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = x[i] + x[i + n];
  return x[0];
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

SPECDEC_HD LanesI load_u16(const void* p) {
  LanesI r;
  SPECDEC_EACH {
    NativeU16 h;
    std::memcpy(&h, static_cast<const char*>(p) + l * sizeof h, sizeof h);
    r.v[l] = __builtin_convertvector(h, NativeI);
  }
  return r;
}
SPECDEC_HD LanesF load(const BFloat16* p) { return as_float(shift_left(load_u16(p), 16)); }

// IEEE half to float without the F16C instruction, exact for subnormals, infinities and NaN in any rounding or flush
// mode.
template <class F, class I>
SPECDEC_HD F half_to_float(I h) {
  const I sign = shift_left(shift_right(h, 15), 31);
  const I magnitude = shift_left(h - shift_left(shift_right(h, 15), 15), 13);
  const F rebased = as_float(magnitude + I(112 << 23));
  const F subnormal = as_float(magnitude + I(113 << 23)) - F(0x1p-14f);
  const F special = as_float(magnitude + I(224 << 23));
  const F exponent = to_float(shift_right(magnitude, 23));
  const F value = select(exponent == F(0.0f), subnormal, select(exponent == F(31.0f), special, rebased));
  return as_float(as_int(value) + sign);
}
#if SPECDEC_VECTOR_BYTES == 64
SPECDEC_HD LanesF load(const Half* p) {
  LanesF r;
  r.v[0] = (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return r;
}
#elif SPECDEC_VECTOR_BYTES == 32
SPECDEC_HD LanesF load(const Half* p) {
  LanesF r;
  SPECDEC_EACH r.v[l] = (NativeF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + l * kNative)));
  return r;
}
#else
SPECDEC_HD LanesF load(const Half* p) { return half_to_float<LanesF>(load_u16(p)); }
#endif

// Rounded to the nearest, ties to even; every NaN becomes the same one.
SPECDEC_HD void store_u16(void* p, const LanesI& a) {
  SPECDEC_EACH {
    const NativeU16 h = __builtin_convertvector(a.v[l], NativeU16);
    std::memcpy(static_cast<char*>(p) + l * sizeof h, &h, sizeof h);
  }
}
SPECDEC_HD void store(BFloat16* p, const LanesF& a) {
  const LanesI x = as_int(select(a == a, a, LanesF(__builtin_nanf(""))));
  store_u16(p, shift_right(x + LanesI(0x7fff) + (shift_right(x, 16) & LanesI(1)), 16));
}
#if SPECDEC_VECTOR_BYTES == 64
SPECDEC_HD void store(Half* p, const LanesF& a) {
  const LanesF x = select(a == a, a, LanesF(__builtin_nanf("")));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x.v[0], _MM_FROUND_TO_NEAREST_INT));
}
#elif SPECDEC_VECTOR_BYTES == 32
SPECDEC_HD void store(Half* p, const LanesF& a) {
  const LanesF x = select(a == a, a, LanesF(__builtin_nanf("")));
  SPECDEC_EACH _mm_storeu_si128(reinterpret_cast<__m128i*>(p + l * kNative),
                                _mm256_cvtps_ph((__m256)x.v[l], _MM_FROUND_TO_NEAREST_INT));
}
#else
SPECDEC_HD void store(Half* p, const LanesF& a) {
  const LanesI magnitude = as_int(a) & LanesI(0x7fffffff), sign = as_int(a) & LanesI(0x80000000);
  const LanesF size = as_float(magnitude);
  // Below 2^-14 an addition to 1/2 rounds to multiples of 2^-24, the least half.
  const LanesI subnormal = as_int(size + LanesF(0.5f)) - LanesI(0x3f000000);
  const LanesI odd = shift_right(magnitude, 13) & LanesI(1);
  const LanesI normal = shift_right(magnitude - LanesI(112 << 23) + LanesI(0xfff) + odd, 13);
  LanesF r = select(LanesF(0x1p-14f) > size, as_float(subnormal), as_float(normal));
  r = select(size >= LanesF(65520.0f), as_float(LanesI(0x7c00)), r);
  r = as_float(as_int(r) + (shift_right(sign, 16) & LanesI(0x8000)));
  store_u16(p, as_int(select(a == a, r, as_float(LanesI(0x7e00)))));
}
#endif

// The 32 elements at p in whatever order suits the dtype, for sums and maxima that do not mind: the even and the odd
// ones of bfloat16, which are then one shift and one mask away from float.
template <class T>
SPECDEC_HD void load_two(const T* p, LanesF& a, LanesF& b) {
  a = load(p);
  b = load(p + kLanes);
}
SPECDEC_HD void load_two(const BFloat16* p, LanesF& a, LanesF& b) {
  SPECDEC_EACH {
    NativeI x;
    std::memcpy(&x, p + 2 * l * kNative, sizeof x);
    a.v[l] = (NativeF)(x << 16);
    b.v[l] = (NativeF)(x & ~0xffff);
  }
}

SPECDEC_HD float load_one(const float* p) { return *p; }
SPECDEC_HD float load_one(const BFloat16* p) {
  return as_float(static_cast<int32_t>(static_cast<uint32_t>(p->bits) << 16));
}
SPECDEC_HD float load_one(const Half* p) { return half_to_float<float>(static_cast<int32_t>(p->bits)); }

// The n < 16 elements at p, then `fill`.
template <class T>
SPECDEC_HD LanesF load_partial(const T* p, int64_t n, float fill) {
  float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = fill;
  for (int64_t i = 0; i < n; ++i) x[i] = load_one(p + i);
  return load(x);
}

}  // namespace specdec::SPECDEC_ISA
