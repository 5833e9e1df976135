"""Device functions: one row of logits to its nucleus.

A row is cut into subtiles of 128 tokens (more past V = 131,072). The scan reads it once and keeps each subtile's maximum
and mass. The maxima bound the cutoff from below, so the search reads only the subtiles that reach the bound again: about
ten of a language model's row, all of a flat one.

The search halves an interval of values between two of the row's own until they meet. What it depends on is summed by one
program in a fixed order, so a row's nucleus does not depend on how many programs scanned it.
"""

import triton
import triton.language as tl

from ._numerics import INF, LEAST_FINITE, LEAST_NORMAL, LOG2E, log_pos

LOOK = tl.constexpr(1024)  # tokens of a second look at once
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
def space_of(space, n, MAXIMA: tl.constexpr):
    """Workspace of scanned row n: MAXIMA maxima, as many masses and list entries, CANDIDATES values."""
    return space + n * (3 * MAXIMA + CANDIDATES)


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
    """exp((z - row_max) / T): 1 at the maximum (+inf included), 0 for -inf. A scale of 0 counts the finite values."""
    # A difference that overflows must not meet a scale of 0.
    x = tl.maximum(z - row_max, LEAST_FINITE) * scale
    return tl.where(z == row_max, 1.0, tl.where(z > -INF, tl.exp2(x), 0.0))


@triton.jit
def _scan_tile(x, mask, subtile, scale, with_mass, bad, space, MAXIMA: tl.constexpr):
    x = x.to(tl.float32)
    bad = bad | ((x != x) & mask).to(tl.int32)
    z = tl.where((x == x) & mask, x, -INF)
    m = tl.max(z, 1)
    tl.store(space + subtile, m)
    if with_mass:
        top = tl.where(m > -INF, m, 0.0)[:, None]
        tl.store(space + (MAXIMA + subtile), tl.sum(tl.where(z == top, 1.0, tl.exp2((z - top) * scale)), 1))
    return bad


@triton.jit
def scan_share(
    row, V, split, splits, scale, with_mass, space, TILE: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr
):
    """Part `split` of `splits` of a row of V logits to the maxima and masses of its subtiles; 1 if a NaN was seen, else 0."""
    SUBS: tl.constexpr = TILE // SUB
    tl.static_assert(SUBS <= MAXIMA)  # or a tile's maxima would be stored over the masses
    tiles = tl.cdiv(V, TILE)
    share = tl.cdiv(tiles, splits)
    first = split * share
    last = tl.minimum(first + share, tiles)
    sub = tl.arange(0, SUBS)
    offset = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    full = V // TILE
    stop = tl.minimum(last, full)
    bad = tl.zeros([SUBS, SUB], tl.int32)
    everything = tl.full([SUBS, SUB], True, tl.int1)
    # One tile ahead: its load is under way while this one is reduced. Whole tiles need no mask, which keeps loads wide.
    ahead = tl.load(row + (first * TILE + offset), mask=everything & (first < stop), other=0.0)
    for t in range(first, stop):
        x = ahead
        ahead = tl.load(row + ((t + 1) * TILE + offset), mask=everything & (t + 1 < stop), other=0.0)
        bad = _scan_tile(x, everything, t * SUBS + sub, scale, with_mass, bad, space, MAXIMA)
    if (first <= full) & (full < last):
        mask = full * TILE + offset < V
        x = tl.load(row + (full * TILE + offset), mask=mask, other=0.0)
        bad = _scan_tile(x, mask, full * SUBS + sub, scale, with_mass, bad, space, MAXIMA)
    return tl.max(tl.max(bad, 1), 0)


@triton.jit
def finished_scan(done, nan, splits):
    """(whether one of a row's programs saw a NaN, whether this one is the last of them to be done). The counter's low
    half counts programs, its high half those that saw one."""
    tl.debug_barrier()  # what this program's warps have stored comes before it counts
    before = tl.atomic_add(done, 1 + (nan.to(tl.int64) << 32))
    return (before >> 32) + nan > 0, (before & 0xFFFFFFFF) == splits - 1


@triton.jit
def load_maxima(space, vocab, SUB: tl.constexpr, MAXIMA: tl.constexpr):
    index = tl.arange(0, MAXIMA)
    return tl.load(space + index, mask=index < tl.cdiv(vocab, SUB), other=-INF, cache_modifier=".cg")


@triton.jit
def list_active(maxima, index, low, active):
    """Subtiles `index` whose maximum reaches `low`, in order, to `active`; returns how many."""
    hit = (maxima >= low) & (maxima > -INF)
    place = tl.cumsum(hit.to(tl.int32), 0)
    tl.debug_barrier()  # a list that was there before has been read
    tl.store(active + (place - 1), index.to(tl.float32, bitcast=True), mask=hit)
    tl.debug_barrier()  # other warps read it
    return tl.max(place, 0)


@triton.jit
def listed(active, index, count):
    """Entries `index` of a list of `count` subtiles, 0 past its end. The workspace holds floats, so it holds their bits."""
    return tl.load(active + index, mask=index < count, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _block(source, active, count, j, SUB: tl.constexpr):
    """The j-th LOOK tokens of a row's `count` active subtiles, NaN and what is missing as -inf.

    `source` is (row, V, other, W, is_other): the row is `row` [V], or where is_other says so `other` [W], if not None.
    """
    row, V, other, W, is_other = source
    place = j * LOOK + tl.arange(0, LOOK)
    offset = listed(active, place // SUB, count) * SUB + place % SUB
    inside = place < count * SUB
    if other is None:
        x = tl.load(row + offset, mask=inside & (offset < V), other=-INF).to(tl.float32)
    else:
        if is_other:
            x = tl.load(other + offset, mask=inside & (offset < W), other=-INF).to(tl.float32)
        else:
            x = tl.load(row + offset, mask=inside & (offset < V), other=-INF).to(tl.float32)
    return tl.where(x == x, x, -INF)


@triton.jit
def _measure(source, active, count, at, top, row_max, scale, SUB: tl.constexpr):
    """Of the active values: the weight of those >= at, how many of them are <= top, their least, the largest of the rest.
    Lane by lane over the blocks, then over the lanes: a pairwise sum, whose error stays at some 2^-24."""
    mass = tl.zeros([LOOK], tl.float32)
    number = tl.zeros([LOOK], tl.int32)
    least = tl.zeros([LOOK], tl.float32) + INF
    below = tl.zeros([LOOK], tl.float32) - INF
    for j in range(0, tl.cdiv(count * SUB, LOOK)):
        x = _block(source, active, count, j, SUB)
        hit = x >= at
        mass += tl.where(hit, weight(x, row_max, scale), 0.0)
        number += (hit & (x <= top)).to(tl.int32)
        least = tl.minimum(least, tl.where(hit, x, INF))
        below = tl.maximum(below, tl.where(hit, -INF, x))
    return tl.sum(mass, 0), tl.sum(number, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _collect(source, active, count, low, top, values, SUB: tl.constexpr):
    """The active values in [low, top], in order, to `values` as far as there is room; how many there are, the least."""
    number = tl.zeros([], tl.int32)
    least = tl.zeros([LOOK], tl.float32) + INF
    tl.debug_barrier()  # values that were there before have been read
    for j in range(0, tl.cdiv(count * SUB, LOOK)):
        x = _block(source, active, count, j, SUB)
        hit = (x >= low) & (x <= top)
        place = number + tl.cumsum(hit.to(tl.int32), 0)
        tl.store(values + (place - 1), x, mask=hit & (place <= CANDIDATES))
        number = tl.max(place, 0)
        least = tl.minimum(least, tl.where(hit, x, INF))
    tl.debug_barrier()  # other warps read them
    return number, tl.min(least, 0)


@triton.jit
def _between(a, c):
    """A number in (a, c]. Halving by value ends: 277 times lead from the largest float's range to the smallest gap, and
    a search moves to the row's own values each time, which takes some ten."""
    mid = a * 0.5 + c * 0.5
    return tl.where(mid > a, mid, c)


@triton.jit
def _search(x, w, a, c, above, goal):
    """Largest value in [a, c] of the block `x` for which above + (weight of values >= it) >= goal; a if there is none.
    a and c are values of x, what of x is above c has no weight."""
    while a < c:
        mid = _between(a, c)
        hit = x >= mid
        if above + tl.sum(tl.where(hit, w, 0.0), 0) >= goal:
            a = tl.min(tl.where(hit, x, INF), 0)
        else:
            c = tl.max(tl.where(hit, -INF, x), 0)
    return a


@triton.jit
def _threshold(source, active, count, goal, low, row_max, scale, values, SUB: tl.constexpr):
    """Largest value >= low whose upper set weighs at least `goal`. `low` is known not to be above it; where rounding says
    that no value gets there, the least is meant, but a count that is not reached gives -inf."""
    c = row_max
    above = tl.zeros([], tl.float32)  # weight of the values above c
    number, a = _collect(source, active, count, low, c, values, SUB)
    missed = (scale == 0.0) & (number < goal)
    if number > CANDIDATES:
        while (number > CANDIDATES) & (a < c):
            mid = _between(a, c)
            mass, upper, least, below = _measure(
                source, active, count, mid, c, row_max, scale, SUB
            )  # fmt: skip
            if mass >= goal:
                a = least
                number = upper
            else:
                c = below
                above = mass
                number -= upper
        number, a = _collect(source, active, count, a, c, values, SUB)
    index = tl.arange(0, CANDIDATES)
    x = tl.load(values + index, mask=index < number, other=-INF)
    w = weight(x, row_max, scale)
    a = _search(x, w, a, c, above, goal)
    return tl.where(missed, -INF, a)


@triton.jit
def nucleus_of(
    source, vocab, greedy, scale, top_p, top_k, min_p, space,
    ORDER: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """(cutoff, row_max, log_mass) of a row of `vocab` logits (`source`: see _block) that `scan_share` has been over;
    `space` is the row's (see space_of)."""
    maxima = load_maxima(space, vocab, SUB, MAXIMA)
    row_max = tl.max(maxima, 0)
    cutoff = row_max
    log_mass = tl.zeros([], tl.float32)
    if row_max == -INF:
        cutoff = -row_max
        log_mass = row_max
    elif not greedy:
        index = tl.arange(0, MAXIMA)
        sums = tl.load(space + (MAXIMA + index), mask=index < tl.cdiv(vocab, SUB), other=0.0, cache_modifier=".cg")
        total = tl.sum(sums * weight(maxima, row_max, scale), 0)
        has_k = (top_k > 0) & (top_k < vocab)
        has_p = top_p < 1.0
        has_m = min_p > 0.0
        if (has_k | has_p | has_m) & (row_max < INF):
            cutoff, mass = _filtered(
                source, vocab, row_max, scale, total, top_p, top_k, min_p,
                has_k, has_p, has_m, space, ORDER, SUB, MAXIMA,
            )  # fmt: skip
            log_mass = log_pos(mass)
        else:
            cutoff = tl.where(has_k | has_p | has_m, INF, -INF)
            log_mass = log_pos(total)
    return cutoff, row_max, log_mass


@triton.jit
def _filtered(
    source, vocab, row_max, scale, total, top_p, top_k, min_p, has_k, has_p, has_m,
    space, ORDER: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """(cutoff, mass) of a finite row under at least one filter."""
    active = space + 2 * MAXIMA
    values = space + 3 * MAXIMA
    slack = 1e-6 * tl.abs(row_max)
    count = tl.zeros([], tl.int32)
    min_p_at = tl.zeros([], tl.float32) - INF
    if has_m:
        log2_min_p = log_pos(tl.minimum(tl.maximum(min_p, LEAST_NORMAL), 1.0)) * LOG2E
        offset = tl.div_rn(log2_min_p, scale)
        low = row_max + offset - (1e-5 * tl.abs(offset) + slack + 1e-30)
        count = list_active(load_maxima(space, vocab, SUB, MAXIMA), tl.arange(0, MAXIMA), low, active)
        min_p_at = row_max
        for j in range(0, tl.cdiv(count * SUB, LOOK)):
            x = _block(source, active, count, j, SUB)
            min_p_at = tl.minimum(min_p_at, tl.min(tl.where((x - row_max) * scale >= log2_min_p, x, INF), 0))

    cutoff = tl.zeros([], tl.float32) - INF
    # Top-k (bit 0), then top-p (bit 1), in one loop that no compiler takes apart: the search is in the program once.
    todo = tl.where(has_k, 1, 0) | tl.where(has_p, 2, 0)
    while todo > 0:
        unit = (todo & 1) == 1
        todo -= tl.where(unit, 1, 2)
        in_scale = tl.where(unit, 0.0, scale)
        goal = top_k.to(tl.float32)
        low = tl.zeros([], tl.float32) + LEAST_FINITE
        if not unit:
            base = cutoff
            if ORDER == ORDER_VLLM:
                base = tl.maximum(cutoff, min_p_at)
            if ORDER == ORDER_JOINT:
                base = tl.zeros([], tl.float32) - INF
            share = tl.maximum(top_p, 0.0)
            goal = share * total
            if base > -INF:
                mass, _, _, _ = _measure(
                    source, active, count, base, row_max, row_max, scale, SUB
                )  # fmt: skip
                goal = share * mass
                low = base
            elif 1.0 - share > 1e-4:
                # Tokens below this cannot hold what top-p leaves out.
                t = log_pos(tl.div_rn((1.0 - share) * total, tl.zeros([], tl.float32) + vocab)) * LOG2E
                low = tl.maximum(low, row_max + tl.div_rn(t * 1.0001 - 0.05, scale) - slack)
        # The maxima alone hold no more than the row: where they reach the goal, so does the row.
        maxima = load_maxima(space, vocab, SUB, MAXIMA)
        w = weight(maxima, row_max, in_scale)
        enough = tl.where(unit, goal, goal * 1.00001)
        if tl.sum(w, 0) >= enough:
            least = tl.min(tl.where(maxima > -INF, maxima, INF), 0)
            low = tl.maximum(low, _search(maxima, w, least, row_max, 0.0, enough))
        count = list_active(maxima, tl.arange(0, MAXIMA), low, active)
        cutoff = tl.maximum(cutoff, _threshold(
            source, active, count, goal, low, row_max, in_scale, values, SUB
        ))  # fmt: skip
    cutoff = tl.maximum(cutoff, min_p_at)
    mass, _, _, _ = _measure(
        source, active, count, tl.maximum(cutoff, LEAST_FINITE), row_max, row_max, scale, SUB
    )  # fmt: skip
    return cutoff, mass


@triton.jit
def first_maximum(row, V, row_max, space, SUB: tl.constexpr, MAXIMA: tl.constexpr):
    """Lowest id whose logit is `row_max`."""
    maxima = load_maxima(space, V, SUB, MAXIMA)
    sub = tl.min(tl.where(maxima == row_max, tl.arange(0, MAXIMA), MAXIMA - 1), 0)
    token = sub * SUB + tl.arange(0, SUB)
    x = tl.load(row + token, mask=token < V, other=-INF).to(tl.float32)
    return tl.min(tl.where(x == row_max, token, 0x7FFFFFFF), 0)
