"""Device functions: one row of logits to its nucleus.

A row is cut into tiles of 4,096 tokens and subtiles of 128 (more for vocabularies past half a million). The scan reads the
row once and keeps each subtile's maximum and mass, both within a warp. The maxima bound the cutoff from below, so the
search reads only the subtiles that reach the bound again: about ten of a language model's row, all of a flat one.

The search halves an interval of values between two of the row's own until they meet. What it depends on is summed by one
program in a fixed order, so a row's nucleus does not depend on how many programs scanned it.
"""

import triton
import triton.language as tl

from ._numerics import INF, LEAST_FINITE, LEAST_NORMAL, LOG2E, log_pos

TILE = tl.constexpr(4096)
CANDIDATES = tl.constexpr(1024)  # values that a search keeps in registers
GREEDY_BELOW = tl.constexpr(1e-5)
ORDER_JOINT = tl.constexpr(2)
ORDER_VLLM = tl.constexpr(1)
STATUS_EMPTY_ROW = tl.constexpr(1)
STATUS_NAN = tl.constexpr(2)


@triton.jit
def clamped(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def slot_of(n, rows, slots, num_slots, num_params):
    """Element of the parameter arrays that row n reads: through `rows` (row to request) and `slots` (request to state)."""
    i = n.to(tl.int64)
    if rows is not None:
        i = tl.load(rows + i).to(tl.int64)
    if slots is not None:
        i = tl.load(slots + clamped(i, num_slots)).to(tl.int64)
    return clamped(i, num_params)


@triton.jit
def temperature_of(pointer):
    """(whether it is greedy, 1 / T, log2(e) / T) of a temperature made safe."""
    t = tl.load(pointer)
    greedy = not (t >= GREEDY_BELOW)
    inverse = tl.div_rn(1.0, tl.where(greedy, 1.0, tl.minimum(t, 1e30)))
    return greedy, inverse, inverse * LOG2E


@triton.jit
def weight(z, row_max, scale):
    """exp((z - row_max) / T): 1 at the maximum (+inf included), 0 for -inf."""
    return tl.where(z == row_max, 1.0, tl.where(z > -INF, tl.exp2((z - row_max) * scale), 0.0))


@triton.jit
def _scan_tile(x, mask, subtile, scale, with_mass, bad, sub_max, sub_sum):
    x = x.to(tl.float32)
    bad = bad | ((x != x) & mask)
    z = tl.where((x == x) & mask, x, -INF)
    m = tl.max(z, 1)
    tl.store(sub_max + subtile, m)
    if with_mass:
        top = tl.where(m > -INF, m, 0.0)[:, None]
        tl.store(sub_sum + subtile, tl.sum(tl.where(z == top, 1.0, tl.exp2((z - top) * scale)), 1))
    return bad


@triton.jit
def scan(row, V, first, last, scale, with_mass, sub_max, sub_sum, SUB: tl.constexpr):
    """Tiles first..last - 1 of a row of V logits to the maxima and masses of their subtiles; 1 if a NaN was seen, else 0."""
    SUBS: tl.constexpr = TILE // SUB
    sub = tl.arange(0, SUBS)
    offset = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    full = V // TILE
    stop = tl.minimum(last, full)
    bad = tl.zeros([SUBS, SUB], tl.int1)
    everything = tl.full([SUBS, SUB], True, tl.int1)
    # One tile ahead: its load is under way while this one is reduced. Whole tiles need no mask, which keeps loads wide.
    ahead = tl.load(row + (first * TILE + offset), mask=everything & (first < stop), other=0.0)
    for t in range(first, stop):
        x = ahead
        ahead = tl.load(row + ((t + 1) * TILE + offset), mask=everything & (t + 1 < stop), other=0.0)
        bad = _scan_tile(x, everything, t * SUBS + sub, scale, with_mass, bad, sub_max, sub_sum)
    if (first <= full) & (full < last):
        mask = full * TILE + offset < V
        x = tl.load(row + (full * TILE + offset), mask=mask, other=0.0)
        bad = _scan_tile(x, mask, full * SUBS + sub, scale, with_mass, bad, sub_max, sub_sum)
    return tl.max(tl.max(bad.to(tl.int32), 1), 0)


@triton.jit
def scan_share(row, V, split, splits, scale, with_mass, sub_max, sub_sum, SUB: tl.constexpr):
    """The part of program `split` of `splits`."""
    tiles = tl.cdiv(V, TILE)
    share = tl.cdiv(tiles, splits)
    first = split * share
    return scan(row, V, first, tl.minimum(first + share, tiles), scale, with_mass, sub_max, sub_sum, SUB)


@triton.jit
def finished_scan(done, nan, splits):
    """(whether one of a row's programs saw a NaN, whether this one is the last of them to be done). The counter's low
    half counts programs, its high half those that saw one."""
    tl.debug_barrier()  # what this program's warps have stored comes before it counts
    before = tl.atomic_add(done, 1 + (nan.to(tl.int64) << 32))
    return (before >> 32) + nan > 0, (before & 0xFFFFFFFF) == splits - 1


@triton.jit
def list_active(maxima, index, low, active):
    """Subtiles `index` whose maximum reaches `low`, in order, to `active`; returns how many."""
    hit = (maxima >= low) & (maxima > -INF)
    place = tl.cumsum(hit.to(tl.int32), 0)
    tl.debug_barrier()  # a list that was there before has been read
    tl.store(active + (place - 1), index, mask=hit)
    tl.debug_barrier()  # other warps read it
    return tl.max(place, 0)


@triton.jit
def _block(row, V, other, W, is_other, active, count, j, SUB: tl.constexpr):
    """The j-th tile's worth of the row's `count` active subtiles, NaN and what is missing as -inf. The row is `row`
    [V], or `other` [W] where `is_other` says so (None: there is none)."""
    SUBS: tl.constexpr = TILE // SUB
    index = j * SUBS + tl.arange(0, SUBS)
    sub = tl.load(active + index, mask=index < count, other=0)
    offset = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = (index < count)[:, None]
    if other is None:
        x = tl.load(row + offset, mask=inside & (offset < V), other=-INF).to(tl.float32)
    else:
        if is_other:
            x = tl.load(other + offset, mask=inside & (offset < W), other=-INF).to(tl.float32)
        else:
            x = tl.load(row + offset, mask=inside & (offset < V), other=-INF).to(tl.float32)
    return tl.where(x == x, x, -INF)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _least(x):
    return tl.min(tl.min(x, 1), 0)


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _measure(row, V, other, W, is_other, active, count, at, top, row_max, scale, unit, SUB: tl.constexpr):
    """Of the active values: the weight of those >= at, how many of them are <= top, their least, the largest of the rest."""
    mass = tl.zeros([], tl.float64)
    number = tl.zeros([], tl.int32)
    least = tl.zeros([], tl.float32) + INF
    below = tl.zeros([], tl.float32) - INF
    for j in range(0, tl.cdiv(count, TILE // SUB)):
        x = _block(row, V, other, W, is_other, active, count, j, SUB)
        hit = x >= at
        mass += _sum(tl.where(hit, tl.where(unit, 1.0, weight(x, row_max, scale)), 0.0)).to(tl.float64)
        number += _sum((hit & (x <= top)).to(tl.int32))
        least = tl.minimum(least, _least(tl.where(hit, x, INF)))
        below = tl.maximum(below, _largest(tl.where(hit, -INF, x)))
    return mass, number, least, below


@triton.jit
def _collect(row, V, other, W, is_other, active, count, low, top, row_max, scale, unit, values, SUB: tl.constexpr):
    """The active values in [low, top], in order, to `values` as far as there is room; how many there are, the least, and
    the weight of the values above `top`."""
    number = tl.zeros([], tl.int32)
    least = tl.zeros([], tl.float32) + INF
    above = tl.zeros([], tl.float64)
    tl.debug_barrier()  # values that were there before have been read
    for j in range(0, tl.cdiv(count, TILE // SUB)):
        x = _block(row, V, other, W, is_other, active, count, j, SUB)
        hit = (x >= low) & (x <= top)
        within = tl.cumsum(hit.to(tl.int32), 1)
        each = tl.max(within, 1)
        place = number + (tl.cumsum(each, 0) - each)[:, None] + within - 1
        tl.store(values + place, x, mask=hit & (place < CANDIDATES))
        number += tl.sum(each, 0)
        least = tl.minimum(least, _least(tl.where(hit, x, INF)))
        above += _sum(tl.where(x > top, tl.where(unit, 1.0, weight(x, row_max, scale)), 0.0)).to(tl.float64)
    tl.debug_barrier()  # other warps read them
    return number, least, above


@triton.jit
def _key(x):
    """An integer that is ordered as the float32 x is."""
    i = x.to(tl.int32, bitcast=True)
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.int64)


@triton.jit
def _between(a, c, passes):
    """A number in (a, c]: halfway by value, and where that takes long, by rank among the floats, which ends."""
    mid = a * 0.5 + c * 0.5
    if passes >= 24:
        k = (_key(a) + (_key(c) - _key(a) + 1) // 2).to(tl.int32)
        mid = tl.where(k < 0, k ^ 0x7FFFFFFF, k).to(tl.float32, bitcast=True)
    return tl.where(mid > a, mid, c)


@triton.jit
def _search(x, w, a, c, above, goal):
    """Largest value in [a, c] of the block `x` for which above + (weight of values >= it) >= goal; a if there is none.
    a and c are values of x, what of x is above c has no weight."""
    passes = 0
    while a < c:
        mid = _between(a, c, passes)
        hit = x >= mid
        if above + tl.sum(tl.where(hit, w, 0.0), 0).to(tl.float64) >= goal:
            a = tl.min(tl.where(hit, x, INF), 0)
        else:
            c = tl.max(tl.where(hit, -INF, x), 0)
        passes += 1
    return a


@triton.jit
def _threshold(
    row, V, other, W, is_other, active, count, goal, low, row_max, scale, unit, values, SUB: tl.constexpr
):  # fmt: skip
    """Largest value >= low whose upper set weighs at least `goal`. `low` is known not to be above it; where rounding says
    that no value gets there, the least is meant, but a count that is not reached gives -inf."""
    c = row_max
    number, a, above = _collect(
        row, V, other, W, is_other, active, count, low, c, row_max, scale, unit, values, SUB
    )  # fmt: skip
    missed = unit & (number < goal)
    if number > CANDIDATES:
        passes = 0
        while (number > CANDIDATES) & (a < c):
            mid = _between(a, c, passes)
            mass, upper, least, below = _measure(
                row, V, other, W, is_other, active, count, mid, c, row_max, scale, unit, SUB
            )  # fmt: skip
            if mass >= goal:
                a = least
                number = upper
            else:
                c = below
                number -= upper
            passes += 1
        number, a, above = _collect(
            row, V, other, W, is_other, active, count, a, c, row_max, scale, unit, values, SUB
        )  # fmt: skip
    index = tl.arange(0, CANDIDATES)
    x = tl.load(values + index, mask=index < number, other=-INF)
    w = tl.where(x > -INF, tl.where(unit, 1.0, weight(x, row_max, scale)), 0.0)
    a = _search(x, w, a, c, above, goal)
    return tl.where(missed, -INF, a)


@triton.jit
def nucleus_of(
    row, V, other, W, is_other, vocab, greedy, scale, top_p, top_k, min_p, sub_max, sub_sum, active, values,
    ORDER: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """(cutoff, row_max, log_mass) of a row of `vocab` logits that `scan` has been over: `row` [V], or `other` [W] if
    `is_other`. MAXIMA: its subtiles, to a power of two."""
    index = tl.arange(0, MAXIMA)
    valid = index < tl.cdiv(vocab, SUB)
    maxima = tl.load(sub_max + index, mask=valid, other=-INF, cache_modifier=".cg")
    row_max = tl.max(maxima, 0)
    cutoff = row_max
    log_mass = tl.zeros([], tl.float32)
    if row_max == -INF:
        cutoff = -row_max
        log_mass = row_max
    elif not greedy:
        sums = tl.load(sub_sum + index, mask=valid, other=0.0, cache_modifier=".cg")
        weights = weight(maxima, row_max, scale)
        total = tl.sum(sums * weights, 0)
        has_k = (top_k > 0) & (top_k < vocab)
        has_p = top_p < 1.0
        has_m = min_p > 0.0
        if (has_k | has_p | has_m) & (row_max < INF):
            cutoff, mass = _filtered(
                row, V, other, W, is_other, vocab, row_max, scale, total.to(tl.float64), top_p, top_k, min_p,
                has_k, has_p, has_m, maxima, weights, index, active, values, ORDER, SUB,
            )  # fmt: skip
            log_mass = log_pos(mass)
        else:
            cutoff = tl.where(has_k | has_p | has_m, INF, -INF)
            log_mass = log_pos(total)
    return cutoff, row_max, log_mass


@triton.jit
def _filtered(
    row, V, other, W, is_other, vocab, row_max, scale, total, top_p, top_k, min_p, has_k, has_p, has_m,
    maxima, weights, index, active, values, ORDER: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """(cutoff, mass) of a finite row under at least one filter."""
    slack = 1e-6 * tl.abs(row_max)
    count = tl.zeros([], tl.int32)
    min_p_at = tl.zeros([], tl.float32) - INF
    if has_m:
        log2_min_p = log_pos(tl.minimum(tl.maximum(min_p, LEAST_NORMAL), 1.0)) * LOG2E
        offset = tl.div_rn(log2_min_p, scale)
        low = row_max + offset - (1e-5 * tl.abs(offset) + slack + 1e-30)
        count = list_active(maxima, index, low, active)
        min_p_at = row_max
        for j in range(0, tl.cdiv(count, TILE // SUB)):
            x = _block(row, V, other, W, is_other, active, count, j, SUB)
            min_p_at = tl.minimum(min_p_at, _least(tl.where((x - row_max) * scale >= log2_min_p, x, INF)))

    cutoff = tl.zeros([], tl.float32) - INF
    for stage in range(2):  # top-k, then top-p: a loop keeps the search in the program once
        unit = stage == 0
        if (unit & has_k) | ((stage == 1) & has_p):
            goal = top_k.to(tl.float64)
            low = tl.zeros([], tl.float32) + LEAST_FINITE
            if stage == 1:
                base = cutoff
                if ORDER == ORDER_VLLM:
                    base = tl.maximum(cutoff, min_p_at)
                if ORDER == ORDER_JOINT:
                    base = tl.zeros([], tl.float32) - INF
                share = tl.maximum(top_p, 0.0).to(tl.float64)
                goal = share * total
                if base > -INF:
                    mass, _, _, _ = _measure(
                        row, V, other, W, is_other, active, count, base, row_max, row_max, scale, False, SUB
                    )  # fmt: skip
                    goal = share * mass
                    low = base
                elif total - goal > 1e-5 * total:
                    # Tokens below this cannot hold what top-p leaves out.
                    t = log_pos(((total - goal) / vocab).to(tl.float32)) * LOG2E
                    low = tl.maximum(low, row_max + tl.div_rn(t * 1.0001 - 0.01, scale) - slack)
            # The maxima alone hold no more than the row: where they reach the goal, so does the row.
            w = tl.where(maxima > -INF, tl.where(unit, 1.0, weights), 0.0)
            enough = tl.where(unit, goal, goal * 1.00001)
            if tl.sum(w, 0) >= enough:
                least = tl.min(tl.where(maxima > -INF, maxima, INF), 0)
                none = tl.zeros([], tl.float64)
                low = tl.maximum(low, _search(maxima, w, least, row_max, none, enough))
            count = list_active(maxima, index, low, active)
            cutoff = tl.maximum(cutoff, _threshold(
                row, V, other, W, is_other, active, count, goal, low, row_max, scale, unit, values, SUB
            ))  # fmt: skip
    cutoff = tl.maximum(cutoff, min_p_at)
    mass, _, _, _ = _measure(
        row, V, other, W, is_other, active, count, tl.maximum(cutoff, LEAST_FINITE), row_max, row_max, scale, False, SUB
    )  # fmt: skip
    return cutoff, mass.to(tl.float32)


@triton.jit
def first_maximum(row, V, row_max, sub_max, SUB: tl.constexpr, MAXIMA: tl.constexpr):
    """Lowest id whose logit is `row_max`."""
    index = tl.arange(0, MAXIMA)
    maxima = tl.load(sub_max + index, mask=index < tl.cdiv(V, SUB), other=-INF, cache_modifier=".cg")
    sub = tl.min(tl.where(maxima == row_max, index, MAXIMA - 1), 0)
    token = sub * SUB + tl.arange(0, SUB)
    x = tl.load(row + token, mask=token < V, other=-INF).to(tl.float32)
    return tl.min(tl.where(x == row_max, token, 0x7FFFFFFF), 0)
