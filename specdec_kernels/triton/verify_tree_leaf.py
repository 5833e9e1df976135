"""The second launch of `verify_tree`: the token behind each request's path, and the outputs."""

import triton
import triton.language as tl

from ._numerics import INF
from ._race import KIND_LOGITS, KIND_PROBS, STREAM_SAMPLE, log_of, log_probability, race_share, token_of
from ._row import STATUS_EMPTY_ROW, STATUS_NAN, slot_of, space_of, temperature_of
from ._trees import NODES, span_of
from ._verify import STATUS_BAD_OFFSETS, STATUS_BITS, draft_row, load_nucleus

WALKED = tl.constexpr(5)
"""What a walk leaves of a request: depth of the node where it ended, its token or -1, number of taken tokens, draft of q's row,
whether offsets or parents made no sense."""


@triton.jit(
    do_not_specialize=[
        "R", "D", "B", "K", "num_slots", "num_params", "num_draft_rows", "draft_height", "num_q_slots", "num_q_params",
        "splits",
    ]
)  # fmt: skip
def leaf_kernel(
    target, stride, R, V, draft_tokens, D, cu, B, K,
    temperature, seed, slots, num_slots, num_params, position,
    draft, draft_stride, draft_height, Vd, draft_rows, num_draft_rows, q_temperature, q_slots, num_q_slots, num_q_params,
    target_to_draft,
    tokens, num_accepted, path, num_emitted, status, logprobs, cutoff, row_max, log_mass,
    p_nucleus, q_nucleus, path_node, path_status, path_argmax, walked, remainder, taken, space, best, nans, finished, splits,
    T_PROBS: tl.constexpr, Q_PROBS: tl.constexpr, PER_LEVEL: tl.constexpr,
    SUB: tl.constexpr, MAXIMA: tl.constexpr, SHARE: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """`splits` programs for each request race the token behind its path; the last of them to be done writes the outputs and
    sets the request's counters back to zero.

    Bytes: of the raced row the subtiles that reach the cutoff, once more, and for a residual the same of its draft row; a row
    of probabilities whole.
    """
    P_KIND: tl.constexpr = KIND_PROBS if T_PROBS else KIND_LOGITS
    Q_KIND: tl.constexpr = KIND_PROBS if Q_PROBS else KIND_LOGITS
    split = tl.program_id(0) % splits
    b = (tl.program_id(0) // splits).to(tl.int64)
    start, count, _ = span_of(cu, b, D, R)
    slot = slot_of(b, None, slots, num_slots, num_params)
    greedy, inverse, scale = temperature_of(temperature + slot)
    greedy = greedy & (not T_PROBS)
    q_greedy = b < 0
    q_scale = scale
    if draft is not None:
        if not Q_PROBS:
            q_slot = slot_of(b, None, q_slots, num_q_slots, num_q_params)
            q_greedy, _, q_scale = temperature_of(q_temperature + q_slot)
    rowless = count < 0
    depth = tl.load(walked + WALKED * b)
    known = tl.load(walked + WALKED * b + 1)
    end = b * (K + 1) + depth
    raced = (not rowless) & (known < 0)
    if raced:
        anchor = tl.zeros([], tl.int64)
        if position is not None:
            anchor = tl.load(position + b)
        c, m, mass = load_nucleus(p_nucleus, end)
        q_c, q_m, q_mass = load_nucleus(q_nucleus, end)
        omega, left_mass = tl.load(remainder + 2 * b), tl.load(remainder + 2 * b + 1)
        residual = left_mass > 0.0
        j = start + tl.load(walked + WALKED * b + 3)
        x = tl.zeros([], tl.int64) - 1
        q_row = None
        if draft is not None:
            q_row = draft
            if residual:
                q_row = draft + draft_row(j, draft_rows, num_draft_rows, draft_height) * draft_stride
                x = tl.load(draft_tokens + j).to(tl.int64)
        own = space_of(space, end if PER_LEVEL else b, MAXIMA)
        key, nan = race_share(
            target + (start + b + tl.load(path_node + end)) * stride, None, V, V, c, m, inverse, mass, scale, False,
            residual, q_row, target_to_draft, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, omega,
            tl.load(seed + slot), anchor + depth, STREAM_SAMPLE, None, taken + b * NODES,
            tl.load(walked + WALKED * b + 2), own, split, splits, P_KIND, Q_KIND, SUB, MAXIMA, SHARE,
        )  # fmt: skip
        if key > 0:
            tl.atomic_max(best + b, key, sem="relaxed")
        if nan > 0:
            tl.atomic_max(nans + b, 1, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(finished + b, 1) != splits - 1:
        return
    won = tl.load(best + b, cache_modifier=".cg")
    extra = tl.zeros([], tl.int32)
    if T_PROBS:
        # A row of probabilities is looked at as a whole only where a token is drawn from it.
        extra = tl.where(tl.load(nans + b, cache_modifier=".cg") > 0, STATUS_NAN, 0)
        extra = tl.where(raced, extra | tl.where(won == 0, STATUS_EMPTY_ROW, 0), 0)
    k = tl.arange(0, K_PAD)
    r = b * (K + 1) + k
    inside = k <= K
    on_path = (k <= depth) & inside
    flags = tl.load(path_status + r, mask=on_path & (not rowless), other=0)
    flags = flags | tl.where(k == depth, extra, 0)
    bits = tl.where(tl.load(walked + WALKED * b + 4) > 0, STATUS_BAD_OFFSETS, 0)
    for bit in tl.static_range(STATUS_BITS):
        bits = bits | tl.max(flags & (1 << bit), 0)
    node = tl.load(path_node + r, mask=on_path & (not rowless), other=0)
    next_node = tl.load(path_node + r + 1, mask=(k < depth) & (not rowless), other=0)
    x = tl.load(draft_tokens + start + next_node - 1, mask=next_node > 0, other=0).to(tl.int32)
    last = tl.where(raced, tl.where(won > 0, token_of(won), 0), tl.maximum(known, 0))
    found = tl.where(k < depth, True, tl.where(raced, won > 0, (flags & STATUS_EMPTY_ROW) == 0)) & (not rowless)
    token = tl.where(k < depth, x, tl.where(found, last, 0))
    tl.store(tokens + r, tl.where(on_path, token, -1), mask=inside)
    tl.store(path + b * K + k - 1, tl.where(on_path & (not rowless), node, -1), mask=inside & (k > 0))
    tl.store(num_accepted + b, depth)
    tl.store(num_emitted + b, depth + 1)
    tl.store(status + b, bits)
    if (logprobs is not None) or (cutoff is not None):
        c = tl.load(p_nucleus + 3 * r, mask=on_path & (not rowless), other=0.0)
        m = tl.load(p_nucleus + 3 * r + 1, mask=on_path & (not rowless), other=0.0)
        mass = tl.load(p_nucleus + 3 * r + 2, mask=on_path & (not rowless), other=0.0)
    if logprobs is not None:
        z = tl.load(target + (start + b + node) * stride + token, mask=on_path & found, other=-INF).to(tl.float32)
        if T_PROBS:
            log_p = log_of(z)
        else:
            log_p = tl.where(greedy, 0.0, log_probability(z, c, m, mass, inverse))
            if path_argmax is not None:  # drafts that no greedy request would emit may have been accepted
                argmax = tl.load(path_argmax + r, mask=on_path & (not rowless) & greedy, other=0)
                log_p = tl.where(greedy & (token != argmax), -INF, log_p)
        tl.store(logprobs + r, tl.where(on_path, tl.where(found, log_p, -INF), 0.0), mask=inside)
    if cutoff is not None:
        lost = rowless & (k == 0)
        tl.store(cutoff + r, tl.where(lost, INF, c), mask=inside)
        tl.store(row_max + r, tl.where(lost, -INF, m), mask=inside)
        tl.store(log_mass + r, tl.where(lost, -INF, mass), mask=inside)
    tl.debug_barrier()  # all have read them
    tl.store(best + b, tl.zeros([], tl.int64))
    tl.store(nans + b, tl.zeros([], tl.int64))
    tl.store(finished + b, tl.zeros([], tl.int64))
