"""Device functions that verification of chains and of trees share: draft rows, accept tests, sums over a row."""

import triton
import triton.language as tl

from ._numerics import INF
from ._race import KIND_LOGITS, draft_prob, log_of, scaled, target_prob
from ._row import LOOK, list_active, listed, load_maxima

STATUS_ZERO_Q = tl.constexpr(4)
STATUS_BAD_Q_ROW = tl.constexpr(8)
STATUS_PLACEHOLDER = tl.constexpr(16)
STATUS_BAD_OFFSETS = tl.constexpr(32)
STATUS_BITS = tl.constexpr(6)


@triton.jit
def draft_row(j, draft_rows, num_draft_rows, rows):
    """Row of the draft matrix behind draft j, or -1."""
    row = j
    if draft_rows is not None:
        row = tl.load(draft_rows + j, mask=j < num_draft_rows, other=-1).to(tl.int64)
    return tl.where((row >= 0) & (row < rows), row, -1)


@triton.jit
def store_nucleus(nuclei, n, cutoff, row_max, log_mass):
    tl.store(nuclei + 3 * n, cutoff)
    tl.store(nuclei + 3 * n + 1, row_max)
    tl.store(nuclei + 3 * n + 2, log_mass)


@triton.jit
def load_nucleus(nuclei, n):
    cutoff = tl.load(nuclei + 3 * n, cache_modifier=".cg")
    row_max = tl.load(nuclei + 3 * n + 1, cache_modifier=".cg")
    return cutoff, row_max, tl.load(nuclei + 3 * n + 2, cache_modifier=".cg")


@triton.jit
def accepts(coin, p, q):
    """coin * q < p, strictly: p = 0 never, p >= q always."""
    return (p > 0.0) & ((p >= q) | (coin * q < p))


@triton.jit
def draft_prob_or_one_hot(
    token, mask, row, column_map, width, cutoff, row_max, log_mass, scale, one_hot, x, KIND: tl.constexpr
):
    """q of target ids where `mask` says so, 0 elsewhere; one-hot at x where `one_hot`."""
    q = (mask & (token == x)).to(tl.float32)
    if not one_hot:
        q = draft_prob(token, mask, row, column_map, width, cutoff, row_max, log_mass, scale, KIND)
    return q


@triton.jit
def excess_mass(
    p_row, vocab, cutoff, row_max, log_mass, scale, weight,
    q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, q_one_hot, x, space, active,
    P_KIND: tl.constexpr, Q_KIND: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Sum of max(0, weight * p - q) over a row. Logits are read where their subtile reaches the cutoff (the list goes to
    `active`, MAXIMA entries), q where p > 0. In a fixed order, so every program that asks gets the same bits."""
    count = tl.cdiv(vocab, SUB)
    if P_KIND == KIND_LOGITS:
        count = list_active(load_maxima(space, vocab, SUB, MAXIMA), tl.arange(0, MAXIMA), cutoff, active)
    total = tl.zeros([LOOK], tl.float32)
    for j in range(0, tl.cdiv(count * SUB, LOOK)):
        place = j * LOOK + tl.arange(0, LOOK)
        token = place
        if P_KIND == KIND_LOGITS:
            token = listed(active, place // SUB, count) * SUB + place % SUB
        mask = (place < count * SUB) & (token < vocab)
        z = tl.load(p_row + token, mask=mask, other=-INF).to(tl.float32)
        p = target_prob(z, cutoff, row_max, log_mass, scale, P_KIND)
        q = draft_prob_or_one_hot(
            token, p > 0.0, q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, q_one_hot, x, Q_KIND
        )
        total += tl.maximum(p * weight - q, 0.0)
    return tl.sum(total, 0)


@triton.jit
def mass_without(
    vocab, q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, q_one_hot, x, taken, num_taken,
    Q_KIND: tl.constexpr,
):  # fmt: skip
    """Sum of q over the target ids that are not among the `num_taken` at `taken`; reads all of the draft row."""
    total = tl.zeros([LOOK], tl.float32)
    for j in range(0, tl.cdiv(vocab, LOOK)):
        token = j * LOOK + tl.arange(0, LOOK)
        counts = token < vocab
        for e in range(0, num_taken):
            counts = counts & (token != tl.load(taken + e))
        total += draft_prob_or_one_hot(
            token, counts, q_row, q_map, q_width, q_cutoff, q_row_max, q_log_mass, q_scale, q_one_hot, x, Q_KIND
        )
    return tl.sum(total, 0)


@triton.jit
def entropy(
    row, vocab, cutoff, row_max, log_mass, scale, inverse, space, active,
    KIND: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """-sum p log p of a target row, in nats; reads what `excess_mass` reads of it."""
    count = tl.cdiv(vocab, SUB)
    if KIND == KIND_LOGITS:
        count = list_active(load_maxima(space, vocab, SUB, MAXIMA), tl.arange(0, MAXIMA), cutoff, active)
    total = tl.zeros([LOOK], tl.float32)
    for j in range(0, tl.cdiv(count * SUB, LOOK)):
        place = j * LOOK + tl.arange(0, LOOK)
        token = place
        if KIND == KIND_LOGITS:
            token = listed(active, place // SUB, count) * SUB + place % SUB
        z = tl.load(row + token, mask=(place < count * SUB) & (token < vocab), other=-INF).to(tl.float32)
        p = target_prob(z, cutoff, row_max, log_mass, scale, KIND)
        if KIND == KIND_LOGITS:
            log_p = scaled(z, row_max, inverse) - log_mass
        else:
            log_p = log_of(p)
        total -= tl.where(p > 0.0, p * log_p, 0.0)
    return tl.maximum(tl.sum(total, 0), 0.0)  # of probabilities that sum up to more than 1 as well
