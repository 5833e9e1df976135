"""`verify_chain` in Triton: two launches, `decide_kernel` and `emit_kernel`.

The first looks at target and draft rows side by side and decides each draft; the second races the row that a request emits
from (under `coupled` all of its rows) and writes the outputs.
"""

import triton
import triton.language as tl

from ._launch import (
    OPTIONS,
    check_vocab,
    check_width,
    maxima_of,
    power_of_2,
    race_share_of,
    race_splits,
    scan_splits,
    scan_tile,
    subtile_of,
    workspace,
)
from ._numerics import INF
from ._race import (
    KIND_LOGITS,
    KIND_PROBS,
    STREAM_SAMPLE,
    accept_coin,
    column_of,
    log_of,
    log_probability,
    probability,
    race_share,
    token_of,
)
from ._row import (
    STATUS_EMPTY_ROW,
    STATUS_NAN,
    finished_scan,
    first_maximum,
    nucleus_of,
    scan_share,
    slot_of,
    space_of,
    temperature_of,
)
from ._verify import (
    STATUS_BAD_OFFSETS,
    STATUS_BAD_Q_ROW,
    STATUS_BITS,
    STATUS_PLACEHOLDER,
    STATUS_ZERO_Q,
    accepts,
    draft_row,
    excess_mass,
    load_nucleus,
    store_nucleus,
)

RULE_BLOCK = tl.constexpr(1)
RULE_COUPLED = tl.constexpr(2)
FROM_RESIDUAL = tl.constexpr(64)  # beside the status bits: the row emits from max(0, weight * p - q)


@triton.jit
def _chain_of(cu, b, D, R, K):
    """(first draft, number of drafts or -1 if there is not even one row, whether that is not what was asked for)."""
    asked = tl.load(cu + b).to(tl.int64)
    past = tl.load(cu + b + 1).to(tl.int64)
    start = tl.minimum(tl.maximum(asked, 0), D)
    end = tl.minimum(tl.maximum(past, start), D)
    count = tl.minimum(tl.minimum(end - start, K), R - 1 - start - b)
    count = tl.maximum(count, -1)
    return start, count, (count < 0) | (start != asked) | (start + count != past)


@triton.jit
def _decide(
    status, greedy, scale, c, m, mass, i, count, x, target_row, q_row, anchor, seed,
    V, draft, draft_stride, Vd, target_to_draft, q_c, q_m, q_mass, q_greedy, q_scale,
    T_PROBS: tl.constexpr, Q_PROBS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """(status with FROM_RESIDUAL, whether draft i is accepted, p(x), q(x)) of a row whose two sides are known. Greedy rows
    and what is decided later count as accepted here: all under `coupled`, and under `block` where p(x) > 0."""
    accepted = i < count
    p = tl.zeros([], tl.float32)
    q = tl.zeros([], tl.float32) + 1.0
    if (i < count) & ((status & STATUS_EMPTY_ROW) == 0):
        if (x < 0) | (x >= V):
            status |= STATUS_PLACEHOLDER
            accepted = i < 0
        elif not greedy:
            if RULE != RULE_COUPLED:
                if T_PROBS:
                    p = tl.load(target_row + x)
                    p = tl.where(p > 0.0, p, 0.0)
                else:
                    p = probability(tl.load(target_row + x).to(tl.float32), c, m, mass, scale)
                usable = i >= 0
                if draft is not None:
                    usable = q_row >= 0
                    if usable & (Q_PROBS | (not q_greedy)):
                        column, inside = column_of(x, target_to_draft, Vd, i >= 0)
                        z = tl.load(draft + q_row * draft_stride + column, mask=inside, other=0.0).to(tl.float32)
                        if Q_PROBS:
                            q = z
                            usable = z - z == 0.0
                        else:
                            usable = (q_c == q_c) & (q_m > -INF) & (q_mass - q_mass == 0.0)
                            q = tl.where(inside, probability(z, q_c, q_m, q_mass, q_scale), 0.0)
                if not usable:
                    status |= STATUS_BAD_Q_ROW
                    accepted = i < 0
                elif not (q > 0.0):
                    status |= STATUS_ZERO_Q
                    accepted = i < 0
                else:
                    coin = accept_coin(seed, anchor, i)
                    later = i < 0
                    if RULE == RULE_BLOCK:
                        later = _by_block(greedy, q_greedy, draft, Q_PROBS)
                    accepted = accepts(coin, p, q) | (later & (p > 0.0))
                    status |= tl.where(accepted & (not later), 0, FROM_RESIDUAL)
    return status, accepted & ((status & STATUS_EMPTY_ROW) == 0), p, q


@triton.jit
def _by_block(greedy, q_greedy, draft, Q_PROBS: tl.constexpr):
    """Whether the block rule's own formulas apply to a request: one-hot drafts have the same law under the token rule."""
    if draft is None:
        yes = greedy & (not greedy)
    elif Q_PROBS:
        yes = not greedy
    else:
        yes = (not greedy) & (not q_greedy)
    return yes


@triton.jit
def _block_end(
    target, stride, V, first_row, scale, draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows, q_scale,
    target_to_draft, p_nucleus, q_nucleus, row_status, odds, weights, space, active, start, end, r, seed, anchor,
    P_KIND: tl.constexpr, Q_KIND: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """(how many drafts stand, the weight of the row behind them) of a request whose chain ends at row `end`; row i is entry
    r + i of the workspace. Every program of the request finds the same."""
    w = tl.zeros([], tl.float32) + 1.0
    for i in range(0, end):
        p = w * tl.load(odds + 2 * (r + i))
        q = tl.load(odds + 2 * (r + i) + 1)
        w = tl.where(p >= q, 1.0, tl.div_rn(p, q))
        tl.store(weights + (r + i), w)  # behind draft i
    tl.debug_barrier()
    # The largest number wins, so the rows are tried from the back, and only those are summed whose coin may still say yes.
    n = end
    failed = n > 0
    while failed:
        w = tl.load(weights + (r + n - 1))
        coin = accept_coin(seed, anchor, n - 1)
        failed = coin >= w
        if (w < 1.0) & (coin < w):
            if (tl.load(row_status + (r + n)) & FROM_RESIDUAL) != 0:
                c, m, mass = load_nucleus(p_nucleus, r + n)
                q_c, q_m, q_mass = load_nucleus(q_nucleus, r + n)
                q_row = draft_row(start + n, draft_rows, num_draft_rows, draft_height)
                z = excess_mass(
                    target + (first_row + n) * stride, V, c, m, mass, scale, w,
                    draft + q_row * draft_stride, target_to_draft, Vd, q_c, q_m, q_mass, q_scale, False, -1,
                    space_of(space, r + n, MAXIMA), active, P_KIND, Q_KIND, SUB, MAXIMA,
                )  # fmt: skip
                failed = coin * (z + (1.0 - w)) >= z
        n = tl.where(failed, n - 1, n)
        failed = failed & (n > 0)
    w = tl.load(weights + (r + n - 1), mask=n > 0, other=1.0)
    return n, w


@triton.jit(
    do_not_specialize=[
        "R", "D", "B", "K", "num_slots", "num_params", "num_draft_rows", "draft_height", "num_saved", "num_q_slots",
        "num_q_params", "splits",
    ]
)  # fmt: skip
def decide_kernel(
    target, stride, R, V, draft_tokens, D, cu, B, K,
    temperature, top_p, top_k, min_p, seed, slots, num_slots, num_params, position,
    draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows,
    draft_cutoff, draft_row_max, draft_log_mass, num_saved,
    q_temperature, q_top_p, q_top_k, q_min_p, q_slots, num_q_slots, num_q_params, target_to_draft,
    p_nucleus, q_nucleus, row_status, row_token, odds, space, done, sides, stop, splits,
    T_PROBS: tl.constexpr, Q_PROBS: tl.constexpr, RULE: tl.constexpr, SIDES: tl.constexpr, EMIT_BONUS: tl.constexpr,
    ORDER: tl.constexpr, P_TILE: tl.constexpr, Q_TILE: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """`splits` programs for each target row and, where q is to be computed (SIDES = 2), each draft row, in the order of
    draft offsets. The last program of a side to be done finds its nucleus; the side that is done second decides the draft.
    A program that finds its request stopped before its row leaves.

    Bytes: V logits of a target row and Vd of a draft row from memory, less what comes after a rejection; the second-level
    cache serves the rest, as in `nucleus`.
    """
    item = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    i = item // (B * SIDES)
    side = (item % (B * SIDES)) // B
    b = (item % B).to(tl.int64)
    start, count, _ = _chain_of(cu, b, D, R, K)
    # Other programs change this word meanwhile: one thread reads it for the block, or its warps could part ways here.
    stopped = tl.atomic_add(stop + b, 0, sem="relaxed")
    wanted = (i < count) | ((i == count) & (side == 0) & EMIT_BONUS)
    if not (wanted & ((stopped == 0) | (i <= K + 1 - stopped))):
        return

    slot = slot_of(b, None, slots, num_slots, num_params)
    greedy, _, scale = temperature_of(temperature + slot)
    greedy = greedy & (not T_PROBS)
    j = start + i
    x = tl.load(draft_tokens + j, mask=i < count, other=-1).to(tl.int64)
    q_row = tl.zeros([], tl.int64) - 1
    q_greedy = i < 0
    q_scale = scale
    q_slot = slot
    if draft is not None:
        if i < count:
            q_row = draft_row(j, draft_rows, num_draft_rows, draft_height)
        if not Q_PROBS:
            q_slot = slot_of(b, None, q_slots, num_q_slots, num_q_params)
            q_greedy, _, q_scale = temperature_of(q_temperature + q_slot)
    # Neither greedy rows nor placeholders are decided by q.
    both = (SIDES == 2) & (i < count) & (x >= 0) & (x < V) & (q_row >= 0) & (not greedy) & (not q_greedy)
    if (side == 1) & (not both):
        return

    row = b * (K + 1) + i
    target_row = target + (start + b + i) * stride
    c = tl.zeros([], tl.float32)
    m = tl.zeros([], tl.float32)
    mass = tl.zeros([], tl.float32)
    seen = i < 0
    if T_PROBS and SIDES == 1:
        if split != 0:
            return
    else:
        f_p, f_k, f_m = tl.load(top_p + slot), tl.load(top_k + slot), tl.load(min_p + slot)
        if SIDES == 2:
            r = tl.where(side == 0, row, B * (K + 1) + b * K + i)
            space = space_of(space, r, MAXIMA)
            q_logits = draft + tl.maximum(q_row, 0) * draft_stride
            nan = tl.zeros([], tl.int32)
            if side == 1:
                nan = scan_share(q_logits, Vd, split, splits, q_scale, True, space, Q_TILE, SUB, MAXIMA)
                f_p, f_k, f_m = tl.load(q_top_p + q_slot), tl.load(q_top_k + q_slot), tl.load(q_min_p + q_slot)
            elif not T_PROBS:
                nan = scan_share(target_row, V, split, splits, scale, not greedy, space, P_TILE, SUB, MAXIMA)
            seen, last = finished_scan(done + r, nan, splits)
            if not last:
                return
            if (side == 1) | (not T_PROBS):
                c, m, mass = nucleus_of(
                    (target_row, V, q_logits, Vd, side == 1), tl.where(side == 1, Vd, V), greedy,
                    tl.where(side == 1, q_scale, scale), f_p, f_k, f_m, space, ORDER, SUB, MAXIMA,
                )  # fmt: skip
        else:
            space = space_of(space, row, MAXIMA)
            nan = scan_share(target_row, V, split, splits, scale, not greedy, space, P_TILE, SUB, MAXIMA)
            seen, last = finished_scan(done + row, nan, splits)
            if not last:
                return
            c, m, mass = nucleus_of(
                (target_row, V, None, 0, False), V, greedy, scale, f_p, f_k, f_m, space, ORDER, SUB, MAXIMA
            )  # fmt: skip

    status = tl.where(seen, STATUS_NAN, 0) | tl.where(m == -INF, STATUS_EMPTY_ROW, 0)
    q_c = tl.zeros([], tl.float32)
    q_m = tl.zeros([], tl.float32) - INF
    q_mass = tl.zeros([], tl.float32)
    if side == 0:
        store_nucleus(p_nucleus, row, c, m, mass)
        tl.store(row_status + row, status)
    else:
        q_c = c
        q_m = tl.where(seen, -INF, m)  # a row with a NaN cannot be used
        q_mass = mass
        store_nucleus(q_nucleus, row, q_c, q_m, q_mass)
    if both:
        tl.debug_barrier()
        if tl.atomic_add(sides + row, 1) == 0:
            return
        q_c, q_m, q_mass = load_nucleus(q_nucleus, row)
        c, m, mass = load_nucleus(p_nucleus, row)
        status = tl.load(row_status + row, cache_modifier=".cg")
    if draft_cutoff is not None:
        saved = (i < count) & (j < num_saved)
        q_c = tl.load(draft_cutoff + j, mask=saved, other=0.0)
        q_m = tl.load(draft_row_max + j, mask=saved, other=-INF)
        q_mass = tl.load(draft_log_mass + j, mask=saved, other=0.0)
        store_nucleus(q_nucleus, row, q_c, q_m, q_mass)

    anchor = tl.zeros([], tl.int64)
    if position is not None:
        anchor = tl.load(position + b)
    status, accepted, p_x, q_x = _decide(
        status, greedy, scale, c, m, mass, i, count, x, target_row, q_row, anchor, tl.load(seed + slot),
        V, draft, draft_stride, Vd, target_to_draft, q_c, q_m, q_mass, q_greedy, q_scale, T_PROBS, Q_PROBS, RULE,
    )  # fmt: skip
    token = tl.zeros([], tl.int32) - 1  # to be raced for
    if (status & STATUS_EMPTY_ROW) != 0:
        token = token * 0
    elif greedy:
        if not T_PROBS:
            token = first_maximum(target_row, V, m, space, SUB, MAXIMA)
            accepted = accepted & (token == x)
    tl.store(row_token + row, token)
    tl.store(row_status + row, status)
    if odds is not None:
        tl.store(odds + 2 * row, p_x)
        tl.store(odds + 2 * row + 1, q_x)
    if not accepted:
        tl.atomic_max(stop + b, K + 1 - i, sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "R", "D", "B", "K", "num_slots", "num_params", "num_draft_rows", "draft_height", "num_q_slots", "num_q_params",
        "splits",
    ]
)  # fmt: skip
def emit_kernel(
    target, stride, R, V, draft_tokens, D, cu, B, K, temperature, seed, slots, num_slots, num_params, position,
    draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows,
    q_temperature, q_slots, num_q_slots, num_q_params, target_to_draft,
    tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max, log_mass,
    p_nucleus, q_nucleus, row_status, row_token, odds, weights, lists, space, done, sides, stop, best, nans, finished,
    splits, T_PROBS: tl.constexpr, Q_PROBS: tl.constexpr, RULE: tl.constexpr, EMIT_BONUS: tl.constexpr,
    SUB: tl.constexpr, MAXIMA: tl.constexpr, SHARE: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """`splits` programs for each request (under `coupled`: for each of its rows) race the tokens it emits; the last of
    a request's programs to be done writes its outputs and sets its counters back to zero.

    Bytes: of a raced row the subtiles that reach the cutoff, once more, and for a residual the same of its draft row; rows
    of probabilities whole.
    """
    P_KIND: tl.constexpr = KIND_PROBS if T_PROBS else KIND_LOGITS
    Q_KIND: tl.constexpr = KIND_PROBS if Q_PROBS else KIND_LOGITS
    COUPLED: tl.constexpr = RULE == RULE_COUPLED
    split = tl.program_id(0) % splits
    item = tl.program_id(0) // splits
    rows = 1
    if COUPLED:
        rows = K + 1
    b = (item // rows).to(tl.int64)
    start, count, clamped = _chain_of(cu, b, D, R, K)
    slot = slot_of(b, None, slots, num_slots, num_params)
    greedy, inverse, scale = temperature_of(temperature + slot)
    greedy = greedy & (not T_PROBS)
    stopped = tl.load(stop + b).to(tl.int64)
    end = tl.where(stopped > 0, K + 1 - stopped, count)  # the first row that is known not to accept
    anchor = tl.zeros([], tl.int64)
    if position is not None:
        anchor = tl.load(position + b)
    q_greedy = b < 0
    q_scale = scale
    if draft is not None:
        if not Q_PROBS:
            q_slot = slot_of(b, None, q_slots, num_q_slots, num_q_params)
            q_greedy, _, q_scale = temperature_of(q_temperature + q_slot)
    weight = tl.zeros([], tl.float32) + 1.0
    if RULE == RULE_BLOCK:
        if _by_block(greedy, q_greedy, draft, Q_PROBS) & (end > 0):
            end, weight = _block_end(
                target, stride, V, start + b, scale, draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows,
                q_scale, target_to_draft, p_nucleus, q_nucleus, row_status, odds, weights, space,
                lists + tl.program_id(0).to(tl.int64) * MAXIMA, start, end, b * (K + 1), tl.load(seed + slot), anchor,
                P_KIND, Q_KIND, SUB, MAXIMA,
            )  # fmt: skip
    i = end
    if COUPLED:
        i = (item % rows).to(tl.int64)
    row = b * (K + 1) + i
    runs = (i <= end) & (i >= 0) & ((i < count) | EMIT_BONUS)
    if runs:
        runs = tl.load(row_token + row) < 0
    if runs:
        flags = tl.load(row_status + row)
        residual = (flags & FROM_RESIDUAL) != 0
        q_row = None
        if draft is not None:
            q_row = draft
            if residual:
                q_row = draft + draft_row(start + i, draft_rows, num_draft_rows, draft_height) * draft_stride
        x = tl.load(draft_tokens + start + i, mask=i < count, other=-1).to(tl.int64)
        c, m, mass = load_nucleus(p_nucleus, row)
        q_c, q_m, q_mass = load_nucleus(q_nucleus, row)
        key, bad = race_share(
            target + (start + b + i) * stride, None, V, V, c, m, inverse, mass, scale, False,
            residual, q_row, target_to_draft, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, weight,
            tl.load(seed + slot), anchor + i, STREAM_SAMPLE, None, None, 0, space_of(space, row, MAXIMA), split, splits,
            P_KIND, Q_KIND, SUB, MAXIMA, SHARE,
        )  # fmt: skip
        if key > 0:
            tl.atomic_max(best + row, key, sem="relaxed")
        if bad > 0:
            tl.atomic_max(nans + row, 1, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(finished + b, 1) == rows * splits - 1:
        k = tl.arange(0, K_PAD)
        r = b * (K + 1) + k
        inside = k <= K
        looked = (k <= end) & ((k < count) | EMIT_BONUS) & (k <= count)
        x = tl.load(draft_tokens + start + k, mask=k < count, other=-1).to(tl.int32)
        flags = tl.load(row_status + r, mask=looked, other=0)
        token = tl.load(row_token + r, mask=looked, other=0)
        raced = looked & (token < 0)
        if not COUPLED:
            raced = raced & (k == end)
        won = tl.load(best + r, mask=raced, other=0, cache_modifier=".cg")
        found = tl.where(raced, won > 0, (flags & STATUS_EMPTY_ROW) == 0)
        token = tl.where(raced, tl.where(won > 0, token_of(won), 0), token)
        accepted = end
        if COUPLED:
            agrees = (k < end) & found & (token == x)
            accepted = tl.min(tl.where(agrees, K_PAD, k), 0).to(tl.int64)
        accepted = tl.maximum(accepted, 0)
        emitted = tl.where((accepted == count) & (not EMIT_BONUS), accepted, accepted + 1)
        if T_PROBS:
            # A row of probabilities is looked at as a whole only where a token is drawn from it.
            nan = tl.load(nans + r, mask=raced, other=0, cache_modifier=".cg") > 0
            flags = flags | tl.where(nan, STATUS_NAN, 0) | tl.where(raced & (won == 0), STATUS_EMPTY_ROW, 0)
        flags = tl.where(k < emitted, flags, 0)
        all_bits = tl.where(clamped, STATUS_BAD_OFFSETS, 0)
        for bit in tl.static_range(STATUS_BITS):
            all_bits = all_bits | tl.max(flags & (1 << bit), 0)
        token = tl.where(k < accepted, x, token)
        emits = looked & (k < emitted)
        rowless = count < 0
        written = emits | (rowless & (k == 0))
        tl.store(tokens + r, tl.where(written, tl.where(emits, token, 0), -1), mask=inside)
        tl.store(num_accepted + b, accepted.to(tl.int32))
        tl.store(num_emitted + b, emitted.to(tl.int32))
        tl.store(status + b, all_bits)
        if (logprobs is not None) or (cutoff is not None):
            c = tl.load(p_nucleus + 3 * r, mask=emits, other=0.0)
            m = tl.load(p_nucleus + 3 * r + 1, mask=emits, other=0.0)
            mass = tl.load(p_nucleus + 3 * r + 2, mask=emits, other=0.0)
        if logprobs is not None:
            z = tl.load(target + (start + b + k) * stride + token, mask=emits & found, other=-INF).to(tl.float32)
            if T_PROBS:
                log_p = log_of(z)
            else:
                log_p = tl.where(greedy, 0.0, log_probability(z, c, m, mass, inverse))
            tl.store(logprobs + r, tl.where(written, tl.where(emits & found, log_p, -INF), 0.0), mask=inside)
        if cutoff is not None:
            lost = rowless & (k == 0)
            tl.store(cutoff + r, tl.where(lost, INF, c), mask=inside)
            tl.store(row_max + r, tl.where(lost, -INF, m), mask=inside)
            tl.store(log_mass + r, tl.where(lost, -INF, mass), mask=inside)
        tl.store(done + r, 0, mask=inside)
        tl.store(done + B * (K + 1) + b * K + k, 0, mask=k < K)
        tl.store(sides + r, 0, mask=inside)
        tl.store(best + r, 0, mask=inside)
        tl.store(nans + r, 0, mask=inside)
        tl.store(stop + b, 0)
        tl.store(finished + b, 0)


def verify_chain(
    target, target_is_probs, draft_tokens, cu_num_draft, temperature, top_p, top_k, min_p, seed, slots, position,
    draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
    draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
    target_to_draft, rule, emit_bonus, filter_order,
    tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    B, K = tokens.shape[0], tokens.shape[1] - 1
    R, V = target.shape
    coupled = rule == RULE_COUPLED.value
    block = rule == RULE_BLOCK.value and draft is not None  # one-hot drafts have the same law under the token rule
    check_vocab("verify_chain", "target_probs" if target_is_probs else "target_logits", V)
    if coupled:
        draft = draft_rows = draft_cutoff = draft_row_max = draft_log_mass = target_to_draft = None
    height, Vd = (0, 0) if draft is None else draft.shape
    sides = 2 if draft is not None and not draft_is_probs and draft_cutoff is None else 1
    widest = max(V, Vd) if sides == 2 else V
    check_vocab("verify_chain", "draft_logits", widest)
    check_width("verify_chain", "max_draft", K)
    maxima, SUB = maxima_of(widest), subtile_of(widest)
    rows = B * (K + 1)
    scanned = rows + (B * K if sides == 2 else 0)
    length = lambda t: 0 if t is None else t.shape[0]  # noqa: E731
    shared = {
        "target": target, "stride": target.stride(0), "R": R, "V": V, "draft_tokens": draft_tokens,
        "D": draft_tokens.shape[0], "cu": cu_num_draft, "B": B, "K": K,
        "temperature": temperature, "seed": seed, "slots": slots, "num_slots": length(slots),
        "num_params": temperature.shape[0], "position": position,
        "draft": draft, "draft_stride": 0 if draft is None else draft.stride(0), "draft_height": height, "Vd": Vd,
        "draft_rows": draft_rows, "num_draft_rows": length(draft_rows),
        "q_temperature": draft_temperature, "q_slots": draft_slots, "num_q_slots": length(draft_slots),
        "num_q_params": length(draft_temperature), "target_to_draft": target_to_draft,
        "T_PROBS": target_is_probs, "Q_PROBS": draft_is_probs and draft is not None, "RULE": rule if coupled or block else 0,
        "EMIT_BONUS": emit_bonus, "SUB": SUB, "MAXIMA": maxima, **OPTIONS,
    }  # fmt: skip
    counters = {"done": rows + B * K, "sides": rows, "best": rows, "nans": rows, "stop": B, "finished": B}
    found = {"p_nucleus": 3 * rows, "q_nucleus": 3 * rows, "row_status": rows, "row_token": rows}
    raced = B * (K + 1 if coupled else 1)
    race = race_splits(raced, V, target.device)
    if block:
        found |= {"odds": 2 * rows, "weights": rows, "lists": raced * race * maxima}
    with workspace(scanned, maxima, counters, target.device, **found) as scratch:
        between = {
            name: scratch.get(name)
            for name in ("p_nucleus", "q_nucleus", "row_status", "row_token", "odds", "space", "done", "sides", "stop")
        }
        splits = scan_splits(scanned, widest, target.device)
        decide_kernel[(splits * scanned,)](
            **shared, **between, top_p=top_p, top_k=top_k, min_p=min_p,
            draft_cutoff=draft_cutoff, draft_row_max=draft_row_max, draft_log_mass=draft_log_mass,
            num_saved=length(draft_cutoff), q_top_p=draft_top_p, q_top_k=draft_top_k, q_min_p=draft_min_p,
            splits=splits, SIDES=sides, ORDER=filter_order, P_TILE=scan_tile(target, SUB),
            Q_TILE=scan_tile(draft, SUB) if sides == 2 else 0,
        )  # fmt: skip
        emit_kernel[(race * raced,)](
            **shared, **between, weights=scratch.get("weights"), lists=scratch.get("lists"), best=scratch["best"], nans=scratch["nans"], finished=scratch["finished"],
            tokens=tokens, num_accepted=num_accepted, num_emitted=num_emitted, status=status, logprobs=logprobs,
            cutoff=cutoff, row_max=row_max, log_mass=log_mass,
            splits=race, SHARE=race_share_of(widest), K_PAD=power_of_2(K + 1),
        )  # fmt: skip
