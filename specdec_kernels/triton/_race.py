"""Device functions: distributions at given tokens, and the exponential race over a row, argmax of log w_v - log e_v.

A program races a share of the row's subtiles, those only whose maximum reaches the cutoff, and makes noise for no others.
Programs meet in one atomic maximum of a key that holds score and token, so the winner does not depend on their number.
"""

import triton
import triton.language as tl

from ._numerics import INF, LEAST_NORMAL, LOG2E, exp2_neg, exponential, log_pos, noise_words, uniform
from ._row import list_active, listed

RACE_TOKENS = tl.constexpr(1024)  # raced at once
KIND_LOGITS = tl.constexpr(0)
KIND_PROBS = tl.constexpr(1)
STREAM_ACCEPT = tl.constexpr(1)
STREAM_SAMPLE = tl.constexpr(2)
_TOKEN_BITS = tl.constexpr(24)
_TOKEN_MASK = tl.constexpr((1 << 24) - 1)


@triton.jit
def column_of(token, column_map, width, mask):
    """(column of a target id in a row of `width`, whether it has one)."""
    if column_map is None:
        column = token
    else:
        column = tl.load(column_map + token, mask=mask, other=-1)
    inside = mask & (column >= 0) & (column < width)
    return tl.where(inside, column, 0), inside


@triton.jit
def scaled(z, row_max, scale):
    return tl.where(z == row_max, 0.0, (z - row_max) * scale)


@triton.jit
def probability(z, cutoff, row_max, log_mass, scale):
    """p of a logit under a nucleus."""
    p = exp2_neg(scaled(z, row_max, scale) - log_mass * LOG2E)
    return tl.where((z >= cutoff) & (z > -INF), p, 0.0)


@triton.jit
def log_probability(z, cutoff, row_max, log_mass, inverse):
    return tl.where((z >= cutoff) & (z > -INF), scaled(z, row_max, inverse) - log_mass, -INF)


@triton.jit
def log_of(p):
    """log p, -inf where p is not positive."""
    return tl.where(p > 0.0, log_pos(tl.maximum(p, LEAST_NORMAL)), -INF)


@triton.jit
def accept_coin(seed, anchor, offset):
    word, _, _, _ = noise_words(tl.zeros([], tl.int32), seed, anchor, (offset.to(tl.int64) << 8) | STREAM_ACCEPT)
    return uniform(word)


@triton.jit
def _exponentials(subs, seed, position, tag, SUB: tl.constexpr):
    """Standard exponentials of the tokens of `subs`, float32 [., SUB]."""
    R: tl.constexpr = subs.shape[0]
    blocks = subs[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
    a, b, c, d = noise_words(blocks, seed, position, tag)
    return tl.reshape(exponential(uniform(tl.join(tl.join(a, c), tl.join(b, d)))), [R, SUB])


@triton.jit
def race_key(score, token, preferred):
    """A positive integer that is larger for `preferred` entries, then for larger scores, then for lower ids."""
    i = score.to(tl.int32, bitcast=True)
    order = tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.int64) + 0x80000000
    return (((preferred.to(tl.int64) << 32) | order) << _TOKEN_BITS) | (token.to(tl.int64) ^ _TOKEN_MASK)


@triton.jit
def score_of(key):
    """Preference and score of a key, as an integer that is in their order."""
    return key >> _TOKEN_BITS


@triton.jit
def token_of(key):
    return ((key ^ _TOKEN_MASK) & _TOKEN_MASK).to(tl.int32)


@triton.jit
def target_prob(z, cutoff, row_max, log_mass, scale, KIND: tl.constexpr):
    """p of what a target row holds."""
    if KIND == KIND_PROBS:
        p = tl.where(z > 0.0, z, 0.0)
    else:
        p = probability(z, cutoff, row_max, log_mass, scale)
    return p


@triton.jit
def draft_prob(token, mask, row, column_map, width, cutoff, row_max, log_mass, scale, KIND: tl.constexpr):
    """q of target ids; read where `mask` says so, 0 elsewhere."""
    column, inside = column_of(token, column_map, width, mask)
    y = tl.load(row + column, mask=inside, other=-INF).to(tl.float32)
    return target_prob(y, cutoff, row_max, log_mass, scale, KIND)


@triton.jit
def race_share(
    p_row, p_map, p_width, vocab, cutoff, row_max, inverse, log_mass, scale, greedy,
    residual, q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, q_one_hot, x, weight,
    seed, position, tag, below, taken, num_taken, space, split, splits,
    P_KIND: tl.constexpr, Q_KIND: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """(best key or 0, of those below `below` if that is not None; whether a NaN was seen) of part `split` of `splits` of the
    target ids, SHARE subtiles at a time.

    p is `p_row` by its kind; without a map and for logits only subtiles that reach the cutoff are read. Where `residual`,
    tokens race by max(0, weight * p - q); q is one-hot at x if `q_one_hot` or `q_row` is None. The `num_taken` tokens at
    `taken`, if that is not None, do not race. In case all of that leaves none, every token races by p.
    """
    R: tl.constexpr = RACE_TOKENS // SUB if SUB < RACE_TOKENS else 1
    best = tl.zeros([], tl.int64)
    bad = tl.zeros([], tl.int32)
    shares = tl.cdiv(tl.cdiv(vocab, SUB), SHARE)
    each = tl.cdiv(shares, splits)
    for share in range(split * each, tl.minimum((split + 1) * each, shares)):
        first = share * SHARE
        active = space + 2 * MAXIMA + first  # shares do not overlap, so programs do not either
        index = first + tl.arange(0, SHARE)
        valid = index < tl.cdiv(vocab, SUB)
        if (P_KIND == KIND_LOGITS) and (p_map is None):
            maxima = tl.load(space + index, mask=valid, other=-INF, cache_modifier=".cg")
            count = list_active(maxima, index, cutoff, active)
        else:
            count = list_active(tl.where(valid, 0.0, -INF), index, 0.0, active)
        for j in range(0, tl.cdiv(count, R)):
            i = j * R + tl.arange(0, R)
            subs = listed(active, i, count)
            token = subs[:, None] * SUB + tl.arange(0, SUB)[None, :]
            mask = (i < count)[:, None] & (token < vocab)
            column, inside = column_of(token, p_map, p_width, mask)
            z = tl.load(p_row + column, mask=inside, other=-INF).to(tl.float32)
            if P_KIND == KIND_PROBS:
                bad = tl.maximum(bad, tl.max(tl.max(((z != z) & inside).to(tl.int32), 1), 0))
                log_w = log_of(z)
            else:
                log_w = tl.where((z >= cutoff) & (z > -INF), scaled(z, row_max, inverse), -INF)
                if greedy:
                    # In the order of the values: a difference to the maximum may round two alike. -0 equals 0.
                    log_w = tl.where((z >= cutoff) & (z > -INF), tl.where(z == 0.0, 0.0, z), -INF)
            preferred = tl.zeros([R, SUB], tl.int1)
            if taken is not None:
                preferred = token >= 0
                for e in range(0, num_taken):
                    preferred = preferred & (token != tl.load(taken + e))
            if residual:
                p = target_prob(z, cutoff, row_max, log_mass, scale, P_KIND)
                q = (token == x).to(tl.float32)
                if q_row is not None:
                    if not q_one_hot:
                        q = draft_prob(
                            token, mask & (p > 0.0), q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, Q_KIND
                        )  # fmt: skip
                p = p * weight
                more = p > q
                if taken is not None:
                    more = more & preferred
                preferred = more
                log_w = tl.where(preferred, log_of(p - q), log_w)
            score = log_w
            if not greedy:
                score = log_w - log_pos(_exponentials(subs, seed, position, tag, SUB))
            key = tl.where(log_w > -INF, race_key(score, token, preferred), 0)
            if below is not None:
                key = tl.where(key < below, key, 0)
            best = tl.maximum(best, tl.max(tl.max(key, 1), 0))
    return best, bad
