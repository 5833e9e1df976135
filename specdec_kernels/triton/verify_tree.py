"""`verify_tree` in Triton: two launches, `walk_kernel` and `leaf_kernel`.

The first walks each request's tree with one program, as csrc/cpu/verify_tree_kernel.h does: it reads the rows of the nodes it
comes to, and what rejections leave of p is always (omega p - q)+ / mass. The second races the row where the walk ended and
writes the outputs.
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
    scan_tile,
    subtile_of,
    workspace,
)
from ._numerics import INF
from ._race import KIND_LOGITS, KIND_PROBS, accept_coin, target_prob
from ._row import (
    STATUS_EMPTY_ROW,
    STATUS_NAN,
    first_maximum,
    nucleus_of,
    scan_share,
    slot_of,
    space_of,
    temperature_of,
)
from ._trees import (
    NODES,
    entry,
    first_of,
    left_of_draft,
    reject,
    repeated,
    span_of,
    store_tokens,
    tree_of,
)
from ._verify import (
    STATUS_BAD_Q_ROW,
    STATUS_PLACEHOLDER,
    STATUS_ZERO_Q,
    accepts,
    draft_row,
    excess_mass,
    load_nucleus,
    store_nucleus,
)
from .verify_tree_leaf import WALKED, leaf_kernel
from .verify_tree_lossy import SYNTHETIC, TYPICAL, lossy_walk_kernel

TARGET_ONLY = tl.constexpr(0)
RECURSIVE = tl.constexpr(1)
TRAVERSAL = tl.constexpr(2)
GREEDY_DRAFT = tl.constexpr(3)
STATE = tl.constexpr(5)  # floats of a node that `traversal` may come back to: weight, omega, mass, last child, ended

# A walk is one program a request and keeps its tree in registers: it has a multiprocessor to itself.
WALK_OPTIONS = OPTIONS | {"maxnreg": 255}


@triton.jit(
    do_not_specialize=[
        "R", "D", "B", "K", "num_slots", "num_params", "num_draft_rows", "draft_height", "num_saved", "num_q_slots",
        "num_q_params",
    ]
)  # fmt: skip
def walk_kernel(
    target, stride, R, V, draft_tokens, parents, D, cu, B, K,
    temperature, top_p, top_k, min_p, seed, slots, num_slots, num_params, position,
    draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows,
    draft_cutoff, draft_row_max, draft_log_mass, num_saved,
    q_temperature, q_top_p, q_top_k, q_min_p, q_slots, num_q_slots, num_q_params, target_to_draft,
    p_nucleus, q_nucleus, path_node, path_status, walked, remainder, taken, state, space,
    T_PROBS: tl.constexpr, Q_PROBS: tl.constexpr, RULE: tl.constexpr, REPLACEMENT: tl.constexpr, SCAN_Q: tl.constexpr,
    ORDER: tl.constexpr, P_TILE: tl.constexpr, Q_TILE: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Program b walks the tree of request b; node by node, it keeps those on its path in entries b (K + 1) + depth.

    Bytes: V logits of each node it comes to and, but for `target_only`, Vd of its draft row; subtiles of both again for each
    rejected child; a draft row once more where the taken tokens leave less than 1/16 of q, or may be not all of its ids.
    """
    P_KIND: tl.constexpr = KIND_PROBS if T_PROBS else KIND_LOGITS
    Q_KIND: tl.constexpr = KIND_PROBS if Q_PROBS else KIND_LOGITS
    b = tl.program_id(0).to(tl.int64)
    start, count, bad = span_of(cu, b, D, R)
    parent, _, token, bad_tree = tree_of(parents, draft_tokens, start, count, V, K)
    bad = bad | bad_tree
    again = repeated(parent, token, parents, draft_tokens, start, count)
    node = tl.arange(0, NODES) + 1
    slot = slot_of(b, None, slots, num_slots, num_params)
    greedy, _, scale = temperature_of(temperature + slot)
    greedy = greedy & (not T_PROBS)
    own_seed = tl.load(seed + slot)
    anchor = tl.zeros([], tl.int64)
    if position is not None:
        anchor = tl.load(position + b)
    q_greedy = b < 0
    q_scale, q_slot = scale, slot
    on_ids = b < 0  # whether all of q's mass is known to be on target ids
    if draft is not None:
        if not Q_PROBS:
            q_slot = slot_of(b, None, q_slots, num_q_slots, num_q_params)
            q_greedy, _, q_scale = temperature_of(q_temperature + q_slot)
            if target_to_draft is None:
                on_ids = (not q_greedy) & (Vd <= V)

    first_row = b * (K + 1)
    own_taken = taken + b * NODES
    q_space = space_of(space, B * (K + 1) + b if RULE == TRAVERSAL else B + b, MAXIMA)
    zero = tl.zeros([], tl.int32)
    fzero = tl.zeros([], tl.float32)
    n, level, last, first, drawn, token_found, status = zero, zero, zero, zero, zero, zero - 1, zero
    c, m, mass, q_c, q_m, q_mass = fzero, fzero, fzero, fzero, fzero, fzero
    w, omega, left_mass = fzero + 1.0, fzero + 1.0, fzero
    fresh, running, pending, returned, ended, usable = b >= 0, count >= 0, b < 0, b < 0, b < 0, b < 0
    s, q_x = fzero + 1.0, fzero
    excluded = node < 0
    while running:
        p_space = space_of(space, first_row + level if RULE == TRAVERSAL else b, MAXIMA)
        active = p_space + 2 * MAXIMA
        p_row = target + (start + b + n) * stride
        kids = (parent == n) & (token >= 0)
        if fresh:
            first = first_of(kids)
            last_child = tl.max(tl.where(parent == n, node, 0), 0)
            drawn = tl.where((entry(token, last_child) >= 0) & (not bad), last_child, 0)
        q_row_index = tl.zeros([], tl.int64) - 1
        q_row = None
        x_first = entry(token, first)
        if draft is not None:
            if first > 0:
                q_row_index = draft_row(start + first - 1, draft_rows, num_draft_rows, draft_height)
            q_row = draft + tl.maximum(q_row_index, 0) * draft_stride
        if fresh:
            asks = n < 0
            if draft is not None:
                asks = (first > 0) & (not greedy)
                if RULE == GREEDY_DRAFT:
                    asks = asks & (drawn > 0)
            status = zero
            c, m, mass = fzero, fzero, fzero
            q_c, q_m, q_mass = fzero, fzero - INF, fzero
            side = zero
            last_side = zero
            if T_PROBS:
                side += 1
                if SCAN_Q:
                    last_side = tl.where(asks & (q_row_index >= 0) & (not q_greedy), 1, 0)
            while side <= last_side:
                on_q = side == 1
                nan = zero
                found_c, found_m, found_mass = fzero, fzero, fzero
                tl.debug_barrier()  # the maxima that were there before have been read
                if SCAN_Q:
                    row_space = tl.where(on_q, q_space, p_space)
                    if on_q:
                        nan = scan_share(q_row, Vd, 0, 1, q_scale, True, row_space, Q_TILE, SUB, MAXIMA)
                    else:
                        if not T_PROBS:
                            nan = scan_share(p_row, V, 0, 1, scale, not greedy, row_space, P_TILE, SUB, MAXIMA)
                    tl.debug_barrier()  # other warps read what this one has stored
                    found_c, found_m, found_mass = nucleus_of(
                        (p_row, V, q_row, Vd, on_q), tl.where(on_q, Vd, V), greedy & (not on_q),
                        tl.where(on_q, q_scale, scale), tl.load(tl.where(on_q, q_top_p + q_slot, top_p + slot)),
                        tl.load(tl.where(on_q, q_top_k + q_slot, top_k + slot)),
                        tl.load(tl.where(on_q, q_min_p + q_slot, min_p + slot)), row_space, ORDER, SUB, MAXIMA,
                    )  # fmt: skip
                elif not T_PROBS:
                    nan = scan_share(p_row, V, 0, 1, scale, not greedy, p_space, P_TILE, SUB, MAXIMA)
                    tl.debug_barrier()
                    found_c, found_m, found_mass = nucleus_of(
                        (p_row, V, None, 0, False), V, greedy, scale, tl.load(top_p + slot), tl.load(top_k + slot),
                        tl.load(min_p + slot), p_space, ORDER, SUB, MAXIMA,
                    )  # fmt: skip
                if on_q:
                    q_c, q_mass = found_c, found_mass
                    q_m = tl.where(nan > 0, -INF, found_m)  # a row with a NaN cannot be used
                else:
                    c, m, mass = found_c, found_m, found_mass
                    status = tl.where(nan > 0, STATUS_NAN, 0) | tl.where(m == -INF, STATUS_EMPTY_ROW, 0)
                    if SCAN_Q:
                        last_side = tl.where(asks & (q_row_index >= 0) & (not q_greedy) & (m > -INF), 1, 0)
                side += 1
            empty = (status & STATUS_EMPTY_ROW) != 0
            first = tl.where(empty, 0, first)
            drawn = tl.where(empty, 0, drawn)
            missing = tl.max(((parent == n) & (token < 0)).to(tl.int32), 0) > 0
            status |= tl.where(missing & (not empty), STATUS_PLACEHOLDER, 0)
            usable = (asks & (not empty)) & (q_row_index >= 0)
            if draft is not None:
                if usable:
                    if Q_PROBS:
                        column = x_first
                        if target_to_draft is not None:
                            column = tl.load(target_to_draft + x_first)
                        has = (column >= 0) & (column < Vd)
                        y = tl.load(q_row + tl.where(has, column, 0), mask=has, other=0.0)
                        usable = y - y == 0.0
                    else:
                        if draft_cutoff is not None:
                            j = start + first - 1
                            q_c = tl.load(draft_cutoff + j, mask=j < num_saved, other=0.0)
                            q_m = tl.load(draft_row_max + j, mask=j < num_saved, other=-INF)
                            q_mass = tl.load(draft_log_mass + j, mask=j < num_saved, other=0.0)
                        usable = q_greedy | ((q_c == q_c) & (q_m > -INF) & (q_mass - q_mass == 0.0))
                status |= tl.where(asks & (not empty) & (not usable), STATUS_BAD_Q_ROW, 0)
            fresh = n < 0
            at = first_row + level
            tl.store(path_node + at, n)
            store_nucleus(p_nucleus, at, c, m, mass)
            if RULE == TRAVERSAL:
                store_nucleus(q_nucleus, at, q_c, q_m, q_mass)
        kids = kids & (first > 0)

        # Where this step leads: down to `down`, or it ends at n, or (pending) a child of n was rejected.
        down = zero
        down_w = fzero + 1.0
        up = n < 0
        ends = n < 0
        if greedy:
            if (status & STATUS_EMPTY_ROW) == 0:
                if not T_PROBS:
                    token_found = first_maximum(p_row, V, m, p_space, SUB, MAXIMA)
                down = first_of(kids & (token == token_found))
            ends = down == 0
        else:
            if (RULE == RECURSIVE) | (RULE == TRAVERSAL):
                child = last
                if not pending:
                    child = tl.where(usable & (not ended), first_of(kids & (node > last)), 0)
                x = entry(token, child)
                if (child > 0) & (returned | (not pending)):  # or it is what the child was tested with
                    before = node < 0
                    if not REPLACEMENT:
                        before = kids & (node < child) & ~again
                    s, q_x, _q_before = left_of_draft(
                        before, child, token, V, q_row, target_to_draft, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x_first,
                        on_ids, own_taken, Q_KIND,
                    )  # fmt: skip
                if pending:
                    left_mass, omega, w = reject(
                        left_mass, omega, w, s, p_row, V, c, m, mass, scale, q_row, target_to_draft, Vd, q_c, q_m, q_mass,
                        q_scale, q_greedy, x_first, p_space, active, P_KIND, Q_KIND, SUB, MAXIMA,
                    )  # fmt: skip
                    pending = n < 0
                    up = w == 0.0
                elif child == 0:
                    if RULE == RECURSIVE:
                        ends = n >= 0
                    else:
                        ends = (n == 0) | (w >= 1.0) | (accept_coin(own_seed, anchor, n - 1) < w)
                        up = not ends
                else:
                    last = child
                    if not (q_x > 0.0):  # it was not drawn from q, and what is left of p is right whatever it was
                        status |= STATUS_ZERO_Q
                        ended = n >= 0
                    else:
                        p_x = target_prob(tl.load(p_row + x).to(tl.float32), c, m, mass, scale, P_KIND)
                        if left_mass > 0.0:
                            rest = omega * p_x - q_x
                            p_x = tl.where(rest > 0.0, tl.div_rn(rest, left_mass), 0.0)
                        q_now = tl.div_rn(q_x, s)
                        if RULE == RECURSIVE:
                            down = tl.where(accepts(accept_coin(own_seed, anchor, child - 1), p_x, q_now), child, 0)
                        else:
                            p_x = w * p_x
                            down_w = tl.where(p_x >= q_now, 1.0, tl.div_rn(p_x, q_now))
                            down = tl.where(down_w > 0.0, child, 0)
                        pending = down == 0
            else:
                by_target = (n >= 0) & (RULE == TARGET_ONLY)
                if RULE == GREEDY_DRAFT:
                    by_target = bad
                fixed = kids & ~again
                decides = n >= 0
                share = fzero + 1.0
                if RULE == GREEDY_DRAFT:
                    if drawn > 0:
                        fixed = fixed & (node != drawn)
                        decides = n < 0
                        if usable:
                            s, q_x, q_fixed = left_of_draft(
                                fixed, drawn, token, V, q_row, target_to_draft, Vd, q_c, q_m, q_mass, q_scale, q_greedy,
                                x_first, on_ids, own_taken, Q_KIND,
                            )  # fmt: skip
                            x = entry(token, drawn)
                            if not (q_x > 0.0):
                                status |= STATUS_ZERO_Q
                            else:
                                p_x = target_prob(tl.load(p_row + x).to(tl.float32), c, m, mass, scale, P_KIND)
                                if accepts(accept_coin(own_seed, anchor, drawn - 1), p_x, tl.div_rn(q_x, s)):
                                    down = drawn
                                else:
                                    decides = n >= 0
                                    # The siblings are no candidates of this q, so all of their p is left.
                                    excess = excess_mass(
                                        p_row, V, c, m, mass, scale, s, q_row, target_to_draft, Vd, q_c, q_m, q_mass, q_scale,
                                        q_greedy, x_first, p_space, active, P_KIND, Q_KIND, SUB, MAXIMA,
                                    )  # fmt: skip
                                    z = tl.load(p_row + token, mask=fixed, other=-INF).to(tl.float32)
                                    kept = s * target_prob(z, c, m, mass, scale, P_KIND)
                                    excess += tl.sum(tl.where(fixed, kept - tl.maximum(kept - q_fixed, 0.0), 0.0), 0)
                                    if excess > 0.0:
                                        left_mass, omega, share = excess, s, s
                if decides:
                    z = tl.load(p_row + token, mask=fixed, other=-INF).to(tl.float32)
                    p_fixed = share * target_prob(z, c, m, mass, scale, P_KIND)
                    p_fixed = tl.where(fixed, tl.div_rn(p_fixed, tl.where(left_mass > 0.0, left_mass, 1.0)), 0.0)
                    # The coin is the parent's: a node's number is the offset of the first draft of a chain behind it.
                    coin = accept_coin(own_seed, anchor, tl.where(by_target, n, tl.maximum(first, 1) - 1))
                    down = first_of(fixed & (coin < tl.cumsum(p_fixed, 0)))
                    excluded = fixed & (down == 0)
                ends = down == 0

        leaves = (down > 0) | up | ends
        if leaves:
            at = first_row + level
            tl.store(path_status + at, status)
            if RULE == TRAVERSAL:
                tl.store(state + STATE * at, w)
                tl.store(state + STATE * at + 1, omega)
                tl.store(state + STATE * at + 2, left_mass)
                tl.store(state + STATE * at + 3, last.to(tl.float32, bitcast=True))
                tl.store(state + STATE * at + 4, ended.to(tl.float32))
        if down > 0:
            n = down
            level += 1
            fresh = n > 0
            last, w, omega, left_mass, ended = zero, down_w, fzero + 1.0, fzero, n < 0
        if RULE == TRAVERSAL:
            if up:
                # A node without weight is rejected, whatever hangs from it.
                n = entry(parent, n)
                level -= 1
                at = first_row + level
                tl.debug_barrier()
                c, m, mass = load_nucleus(p_nucleus, at)
                q_c, q_m, q_mass = load_nucleus(q_nucleus, at)
                status = tl.load(path_status + at)
                w = tl.load(state + STATE * at)
                omega = tl.load(state + STATE * at + 1)
                left_mass = tl.load(state + STATE * at + 2)
                last = tl.load(state + STATE * at + 3).to(tl.int32, bitcast=True)
                ended = tl.load(state + STATE * at + 4) > 0.0
                usable = n >= 0
                first = first_of((parent == n) & (token >= 0))
                pending = n >= 0
            returned = up
        running = not ends

    number = store_tokens(excluded, token, own_taken)
    tl.store(walked + WALKED * b, level)
    tl.store(walked + WALKED * b + 1, tl.where((status & STATUS_EMPTY_ROW) != 0, 0, token_found))
    tl.store(walked + WALKED * b + 2, number)
    tl.store(walked + WALKED * b + 3, first - 1)
    tl.store(walked + WALKED * b + 4, bad.to(tl.int32))
    tl.store(remainder + 2 * b, omega)
    tl.store(remainder + 2 * b + 1, left_mass)
    store_nucleus(q_nucleus, first_row + level, q_c, q_m, q_mass)


def verify_tree(
    target, target_is_probs, draft_tokens, parents, cu_num_draft, temperature, top_p, top_k, min_p, seed, slots, position,
    draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
    draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
    target_to_draft, rule, replacement, bound, factor, rates, filter_order,
    tokens, num_accepted, path, num_emitted, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    B, K = tokens.shape[0], tokens.shape[1] - 1
    R, V = target.shape
    height, Vd = (0, 0) if draft is None else draft.shape
    scans_q = draft is not None and not draft_is_probs and draft_cutoff is None
    widest = max(V, Vd) if scans_q else V
    check_vocab("verify_tree", "target_probs" if target_is_probs else "target_logits", V)
    check_vocab("verify_tree", "draft_logits", widest)
    check_width("verify_tree", "max_depth", K)
    maxima, SUB = maxima_of(widest), subtile_of(widest)
    rows = B * (K + 1)
    scanned = (rows if rule == TRAVERSAL.value else B) + (B if scans_q else 0)
    length = lambda t: 0 if t is None else t.shape[0]  # noqa: E731
    lossy = rule >= TYPICAL.value
    shared = {
        "target": target, "stride": target.stride(0), "R": R, "V": V, "draft_tokens": draft_tokens,
        "D": min(draft_tokens.shape[0], parents.shape[0]), "cu": cu_num_draft, "B": B, "K": K,
        "temperature": temperature, "seed": seed, "slots": slots, "num_slots": length(slots),
        "num_params": temperature.shape[0], "position": position,
        "T_PROBS": target_is_probs, "SUB": SUB, "MAXIMA": maxima,
    }  # fmt: skip
    q = {
        "draft": draft, "draft_stride": 0 if draft is None else draft.stride(0), "draft_height": height, "Vd": Vd,
        "draft_rows": draft_rows, "num_draft_rows": length(draft_rows),
        "q_temperature": draft_temperature, "q_slots": draft_slots, "num_q_slots": length(draft_slots),
        "num_q_params": length(draft_temperature), "target_to_draft": target_to_draft,
        "Q_PROBS": draft_is_probs and draft is not None,
    }  # fmt: skip
    walks = {
        "parents": parents, "RULE": rule, "top_p": top_p, "top_k": top_k, "min_p": min_p, "ORDER": filter_order,
        # Where no draft rows are scanned there is room for loads twice as wide.
        "P_TILE": min(scan_tile(target, SUB) * (1 if scans_q else 2), maxima * SUB),
    }  # fmt: skip
    counters = {"best": B, "nans": B, "finished": B}
    found = {
        "p_nucleus": 3 * rows, "q_nucleus": 3 * rows, "path_node": rows, "path_status": rows,
        "walked": WALKED.value * B, "remainder": 2 * B, "taken": NODES.value * B,
    }  # fmt: skip
    if rule == TRAVERSAL.value:
        found["state"] = STATE.value * rows
    if rule == SYNTHETIC.value:
        found["path_argmax"] = rows
    splits = race_splits(B, V, target.device)
    with workspace(scanned, maxima, counters, target.device, **found) as scratch:
        between = {
            name: scratch[name]
            for name in ("p_nucleus", "path_node", "path_status", "walked", "remainder", "taken", "space")
        }
        path_argmax = scratch.get("path_argmax")
        if lossy:
            lossy_walk_kernel[(B,)](
                **shared, **walks, **between, path_argmax=path_argmax,
                bound=bound, factor=factor, rates=rates, num_rates=length(rates), **WALK_OPTIONS,
            )  # fmt: skip
        else:
            walk_kernel[(B,)](
                **shared, **q, **walks, **between, q_nucleus=scratch["q_nucleus"], state=scratch.get("state"),
                draft_cutoff=draft_cutoff, draft_row_max=draft_row_max,
                draft_log_mass=draft_log_mass, num_saved=length(draft_cutoff), q_top_p=draft_top_p, q_top_k=draft_top_k,
                q_min_p=draft_min_p, REPLACEMENT=replacement, SCAN_Q=scans_q,
                Q_TILE=scan_tile(draft, SUB) if scans_q else 0, **WALK_OPTIONS,
            )  # fmt: skip
        leaf_kernel[(B * splits,)](
            **shared, **q, **between, PER_LEVEL=rule == TRAVERSAL.value, q_nucleus=scratch["q_nucleus"], path_argmax=path_argmax, best=scratch["best"],
            nans=scratch["nans"], finished=scratch["finished"],
            tokens=tokens, num_accepted=num_accepted, path=path, num_emitted=num_emitted, status=status, logprobs=logprobs,
            cutoff=cutoff, row_max=row_max, log_mass=log_mass,
            splits=splits, SHARE=race_share_of(widest), K_PAD=power_of_2(K + 1), **OPTIONS,
        )  # fmt: skip
