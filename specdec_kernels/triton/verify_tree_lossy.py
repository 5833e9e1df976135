"""The first launch of `verify_tree` under a lossy rule (`specdec_kernels.lossy`); the second is that of the exact ones."""

import triton
import triton.language as tl

from ._numerics import INF, LEAST_NORMAL, LOG2E, exp2_neg
from ._race import KIND_LOGITS, KIND_PROBS, accept_coin, log_of, scaled, target_prob
from ._row import STATUS_EMPTY_ROW, STATUS_NAN, first_maximum, nucleus_of, scan_share, slot_of, space_of, temperature_of
from ._trees import NODES, entry, first_of, repeated, span_of, store_tokens, tree_of
from ._verify import STATUS_PLACEHOLDER, entropy, store_nucleus
from .verify_tree_leaf import WALKED

TYPICAL = tl.constexpr(4)
THRESHOLD = tl.constexpr(5)
SYNTHETIC = tl.constexpr(6)


@triton.jit
def _deepest(accepted, depth, log_p):
    """The accepted node that `typical` ends at, 0 if there is none: the deepest, then the likeliest, then the lowest."""
    deepest = tl.max(tl.where(accepted, depth, 0), 0)
    accepted = accepted & (depth == deepest)
    likeliest = tl.max(tl.where(accepted, log_p, -INF), 0)
    return first_of(accepted & (log_p == likeliest))


@triton.jit(do_not_specialize=["R", "D", "B", "K", "num_slots", "num_params", "num_rates"])
def lossy_walk_kernel(
    target, stride, R, V, draft_tokens, parents, D, cu, B, K,
    temperature, top_p, top_k, min_p, seed, slots, num_slots, num_params, position, bound, factor, rates, num_rates,
    p_nucleus, path_node, path_status, path_argmax, walked, remainder, taken, space,
    T_PROBS: tl.constexpr, RULE: tl.constexpr, ORDER: tl.constexpr, P_TILE: tl.constexpr, SUB: tl.constexpr,
    MAXIMA: tl.constexpr,
):  # fmt: skip
    """Program b walks the tree of request b, as `walk_kernel` does.

    Bytes: V logits of each node it comes to. `typical` comes to every accepted node that has children, in the order of their
    ids, and once more to those on the path it has chosen.
    """
    P_KIND: tl.constexpr = KIND_PROBS if T_PROBS else KIND_LOGITS
    b = tl.program_id(0).to(tl.int64)
    start, count, bad = span_of(cu, b, D, R)
    parent, depth, token, bad_tree = tree_of(parents, draft_tokens, start, count, V, K)
    again = repeated(parent, token, parents, draft_tokens, start, count)
    node = tl.arange(0, NODES) + 1
    slot = slot_of(b, None, slots, num_slots, num_params)
    greedy, inverse, scale = temperature_of(temperature + slot)
    greedy = greedy & (not T_PROBS)
    own_seed = tl.load(seed + slot)
    anchor = tl.zeros([], tl.int64)
    if position is not None:
        anchor = tl.load(position + b)

    first_row = b * (K + 1)
    own = space_of(space, b, MAXIMA)
    zero = tl.zeros([], tl.int32)
    n, level, token_found, status = zero, zero, zero - 1, zero
    c, m, mass = zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32)
    running = count >= 0
    excluded, accepted, on_path = node < 0, node < 0, node < 0
    log_p = tl.zeros([NODES], tl.float64)
    choosing = (n >= 0) & (RULE == TYPICAL) & (not greedy)
    while running:
        row = target + (start + b + n) * stride
        status = zero
        if not T_PROBS:
            tl.debug_barrier()  # the maxima that were there before have been read
            nan = scan_share(row, V, 0, 1, scale, not greedy, own, P_TILE, SUB, MAXIMA)
            tl.debug_barrier()  # other warps read what this one has stored
            c, m, mass = nucleus_of(
                (row, V, None, 0, False), V, greedy, scale, tl.load(top_p + slot), tl.load(top_k + slot),
                tl.load(min_p + slot), own, ORDER, SUB, MAXIMA,
            )  # fmt: skip
            status = tl.where(nan > 0, STATUS_NAN, 0) | tl.where(m == -INF, STATUS_EMPTY_ROW, 0)
        empty = (status & STATUS_EMPTY_ROW) != 0
        kids = (parent == n) & (token >= 0) & (not empty)
        missing = tl.max(((parent == n) & (token < 0)).to(tl.int32), 0) > 0
        status |= tl.where(missing & (not empty), STATUS_PLACEHOLDER, 0)
        z = tl.load(row + token, mask=kids, other=-INF).to(tl.float32)
        p_kids = tl.where(kids, target_prob(z, c, m, mass, scale, P_KIND), 0.0)
        if choosing:
            h = entropy(row, V, c, m, mass, scale, inverse, own, own + 2 * MAXIMA, P_KIND, SUB, MAXIMA)
            least = tl.maximum(tl.minimum(bound, factor * exp2_neg(-h * LOG2E)), LEAST_NORMAL)
            passes = kids & (p_kids > least)
            accepted = accepted | passes
            if T_PROBS:
                own_log_p = log_of(p_kids)
            else:
                own_log_p = scaled(z, m, inverse) - mass
            log_p = tl.where(passes, entry(log_p, n) + own_log_p.to(tl.float64), log_p)
            # The next accepted node with children to look at.
            n = first_of(accepted & (node > n))
            while (n > 0) & (tl.max(((parent == n) & (token >= 0)).to(tl.int32), 0) == 0):
                n = first_of(accepted & (node > n))
            if n == 0:
                choosing = n < 0
                at = _deepest(accepted, depth, log_p)
                while at > 0:
                    on_path = on_path | (node == at)
                    at = entry(parent, at)
        else:
            if RULE == SYNTHETIC:
                rate = tl.load(rates + level, mask=level < num_rates, other=0.0)
                down = tl.where(accept_coin(own_seed, anchor, n) < rate, first_of(kids), 0)  # a NaN accepts nothing
            elif RULE == TYPICAL:
                down = first_of(kids & on_path)
            else:
                fixed = kids & ~again
                p_fixed = tl.where(fixed, p_kids, 0.0)
                enough = (accept_coin(own_seed, anchor, n) * factor < tl.cumsum(p_fixed, 0)) | (p_fixed >= bound)
                down = first_of(fixed & enough)
                excluded = fixed & (down == 0)
            if greedy:
                if not T_PROBS:
                    token_found = first_maximum(row, V, m, own, SUB, MAXIMA)
                    if path_argmax is not None:
                        tl.store(path_argmax + first_row + level, token_found)
                if RULE != SYNTHETIC:
                    down = first_of(kids & (token == token_found))
            at_level = first_row + level
            tl.store(path_node + at_level, n)
            tl.store(path_status + at_level, status)
            store_nucleus(p_nucleus, at_level, c, m, mass)
            running = down > 0
            level += running.to(tl.int32)
            n = tl.where(running, down, n)

    number = store_tokens(excluded, token, taken + b * NODES)
    tl.store(walked + WALKED * b, level)
    tl.store(walked + WALKED * b + 1, tl.where((status & STATUS_EMPTY_ROW) != 0, 0, token_found))
    tl.store(walked + WALKED * b + 2, number)
    tl.store(walked + WALKED * b + 3, -1)
    tl.store(walked + WALKED * b + 4, (bad | bad_tree).to(tl.int32))
    tl.store(remainder + 2 * b, 1.0)
    tl.store(remainder + 2 * b + 1, 0.0)  # nothing is taken from p
