"""exp2, log and noise in float32 by the operations that every backend shares (csrc/core/numerics.h), for Triton.

Kernels that use them are compiled without fusing multiplications into additions, so the bits are the same.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
LEAST_FINITE = tl.constexpr(-3.4028234663852886e38)
LEAST_NORMAL = tl.constexpr(2.0**-126)  # a literal below it would be a float64


@triton.jit
def exp2_floor(t):
    """2^t for t <= 0, not below 2^-126; relative error 2e-7."""
    t = tl.where(t > -126.0, t, -126.0)
    shifted = t + 12582912.0  # 1.5 * 2^23: the low mantissa bits now hold round(t)
    f = t - (shifted - 12582912.0)
    y = f * 0.00132647273 + 0.00967151299
    y = y * f + 0.0555073358
    y = y * f + 0.240222424
    y = y * f + 0.693147004
    y = y * f + 1.0
    return (y.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def exp2_neg(t):
    """2^t for t <= 0, and 0 below 2^-126. Above 0, t is taken as at most 1."""
    t = tl.where(t > 1.0, 1.0, t)
    return tl.where(t > -126.0, exp2_floor(t), 0.0)


@triton.jit
def _log_parts(f, e):
    s = tl.div_rn(f, f + 2.0)
    s2 = s * s
    r = s2 * 0.22222222222 + 0.28571428571
    r = r * s2 + 0.4
    r = r * s2 + 0.66666666667
    tail = s * s2 * r + e * 9.0580006145e-6
    return e * 0.693138122559 + (s + s + tail)


@triton.jit
def log_pos(x):
    """log x for normal positive x."""
    i = x.to(tl.int32, bitcast=True)
    e = (i - 0x3F3504F3) >> 23
    return _log_parts((i - (e << 23)).to(tl.float32, bitcast=True) - 1.0, e.to(tl.float32))


@triton.jit
def exponential(u):
    """-log1p(-u), a standard exponential, for u in [2^-33, 1 - 2^-24]."""
    i = (1.0 - u).to(tl.int32, bitcast=True)
    e = (i - 0x3F3504F3) >> 23
    scaled = (i - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    exponent = e.to(tl.float32)
    # Where 1 - u needs no scaling, u itself is the mantissa's distance from 1, which keeps small u exact.
    return 0.0 - _log_parts(tl.where(e == 0, 0.0 - u, scaled), exponent)


@triton.jit
def uniform(word):
    """(word + 1/2) 2^-32 in float32, at most 1 - 2^-24; word uint32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.99999994, u, 0.99999994)


@triton.jit
def rounded_to_bfloat16(x):
    """float32 with the values of bfloat16, to the nearest, ties to even. Triton's interpreter cuts the bits off instead."""
    i = x.to(tl.int32, bitcast=True)
    i = ((i + 0x7FFF + ((i >> 16) & 1)) >> 16) << 16
    return tl.where(x == x, i.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def noise_words(index, seed, position, tag):
    """The four uint32 words of the Philox4x32-10 block `index` under a row's key; tag = stream | id << 8."""
    zero = index.to(tl.int64) * 0
    return tl.philox_impl(
        index.to(tl.uint32), (zero + position).to(tl.uint32), (zero + (position >> 32)).to(tl.uint32),
        (zero + tag).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32), 10,
    )  # fmt: skip
