"""`verify_chain` in plain torch: positions in turn, a chunk of requests at once."""

import torch

from .. import _backends
from . import _rows
from ._verify import Draft, Target, excess, residual
from .sample import gather_seed

TOKEN, BLOCK, COUPLED = 0, 1, 2


def verify_chain(
    target, target_is_probs, draft_tokens, cu_num_draft, temperature, top_p, top_k, min_p, seed, slots, position,
    draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
    draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
    target_to_draft, rule, emit_bonus, filter_order,
    tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    def part(tensor, s):
        return None if tensor is None else tensor[s]

    def params_part(params, slots, s):
        return (params, slots[s]) if slots is not None else ([part(p, s) for p in params], None)

    B = tokens.shape[0]
    step = max(_rows.CHUNK_ELEMENTS // target.shape[1], 1)
    for i in range(0, B, step):
        s = slice(i, min(i + step, B))
        p_params, p_slots = params_part((temperature, top_p, top_k, min_p, seed), slots, s)
        q_params, q_slots = params_part((draft_temperature, draft_top_p, draft_top_k, draft_min_p), draft_slots, s)
        _verify_requests(
            i, target, target_is_probs, draft_tokens, cu_num_draft[i : s.stop + 1], *p_params, p_slots, part(position, s),
            draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass, *q_params, q_slots,
            target_to_draft, rule, emit_bonus, filter_order,
            tokens[s], num_accepted[s], num_emitted[s], status[s],
            part(logprobs, s), part(cutoff, s), part(row_max, s), part(log_mass, s),
        )  # fmt: skip


def _verify_requests(
    first, target, target_is_probs, draft_tokens, cu_num_draft, temperature, top_p, top_k, min_p, seed, slots, position,
    draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
    draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
    target_to_draft, rule, emit_bonus, filter_order,
    tokens, num_accepted, num_emitted, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    """Requests first, first + 1, ...: arguments of one per request are theirs, the others are the whole batch's."""
    B, K = tokens.shape[0], tokens.shape[1] - 1
    R, vocab = target.shape
    D, device = draft_tokens.shape[0], target.device
    params = _rows.gather_params(temperature, top_p, top_k, min_p, slots, None)
    seeds = gather_seed(seed, slots, None)
    anchor = torch.zeros(B, dtype=torch.int64, device=device) if position is None else position
    q_params = None
    if draft_temperature is not None:
        q_params = _rows.gather_params(draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots, None)
    p_source = Target(target, target_is_probs, params, filter_order)
    saved = None if draft_cutoff is None else (draft_cutoff, draft_row_max, draft_log_mass)
    q_source = Draft(draft, draft_is_probs, draft_rows, saved, q_params, target_to_draft, filter_order, vocab)
    greedy = params.greedy if not target_is_probs else torch.zeros(B, dtype=torch.bool, device=device)

    cu = cu_num_draft.long()
    request = torch.arange(first, first + B, device=device)
    start = cu[:-1].clamp(0, D)
    end = torch.minimum(torch.maximum(cu[1:], start), torch.full_like(start, D))
    d = torch.minimum((end - start).clamp_max(K), R - 1 - start - request)
    rowless = d < 0
    state = torch.where((d >= 0) & (start == cu[:-1]) & (start + d == cu[1:]), 0, _rows.BAD_OFFSETS).to(torch.int32)
    first_row = start + request

    by_block = torch.zeros_like(greedy)
    if rule == BLOCK and draft is not None:  # one-hot drafts have the law of the token rule
        by_block = ~greedy & (~q_params.greedy if q_params is not None else True)
    zeros = torch.zeros_like(d)
    k, ones = torch.arange(K + 1, device=device), torch.ones(B, dtype=torch.float64, device=device)
    out = torch.zeros(B, K + 1, dtype=torch.int64, device=device)  # what row i emits, if it is emitted
    log_p = torch.zeros(B, K + 1, dtype=torch.float64, device=device)
    found = torch.zeros(3, B, K + 1, dtype=torch.float64, device=device)
    states = torch.zeros(B, K + 1, dtype=torch.int32, device=device)
    weights = torch.zeros(B, K + 2, dtype=torch.float64, device=device)  # block: w_i, 0 where row i is not reached
    weights[:, 0] = 1.0
    has_q = torch.zeros(B, K + 1, dtype=torch.bool, device=device)  # block: there is a draft behind row i
    accepted = zeros.clone()
    alive = ~rowless  # still accepting
    for i in range(K + 1):
        here = alive & (i < d)
        visit = alive & (i <= d) if emit_bonus else here
        if R == 0:
            break
        p, row_status, empty, fields = p_source.rows(first_row + i)
        flat = (start + i).clamp(0, max(D - 1, 0))
        draft_id = draft_tokens[flat].long() if D else zeros - 1
        placeholder = here & ~empty & ((draft_id < 0) | (draft_id >= vocab))
        row_status = row_status | torch.where(placeholder, _rows.PLACEHOLDER, 0)
        x = draft_id.clamp(0, vocab - 1)
        plain = _rows.race(p, seeds, anchor + i, 2, zeros)
        token = plain
        if rule != COUPLED and i < K and D:
            q, usable = q_source.rows(flat, x)
            p_x, q_x = p.gather(1, x[:, None])[:, 0], q.gather(1, x[:, None])[:, 0]
            decides = here & ~empty & ~placeholder & ~greedy
            row_status = row_status | torch.where(decides & ~usable, _rows.BAD_Q_ROW, 0)
            tested = decides & usable & (q_x > 0)
            row_status = row_status | torch.where(decides & usable & ~tested, _rows.ZERO_Q, 0)
            u = _rows.uniforms(seeds, anchor, 1, zeros + i, 1)[:, 0]
            has_q[:, i] = tested
            ratio = weights[:, i] * p_x / torch.where(tested, q_x, 1.0)
            weights[:, i + 1] = torch.where(tested, ratio.clamp_max(1.0), 0.0)
            test = (p_x > 0) & (by_block | (p_x >= q_x) | (u * q_x < p_x))
            left = _rows.race(residual(p, q, ones), seeds, anchor + i, 2, zeros)
            same = greedy & ~placeholder & (plain == draft_id)
            take = (tested & test) | (here & ~empty & same)
            token = torch.where(take, x, torch.where(tested, left, plain))
        else:
            possible = p.gather(1, plain[:, None])[:, 0] > 0
            take = here & ~empty & ~placeholder & (plain == draft_id) & possible
        drawn = visit & (~take | (rule == COUPLED)) & ~by_block
        row_status = row_status | torch.where(drawn, p_source.sampled_status(first_row + i), 0)
        states[:, i], out[:, i] = row_status.to(torch.int32), token
        log_p[:, i] = p.gather(1, token[:, None])[:, 0].log()
        for field, value in zip(found, fields, strict=True):
            field[:, i] = value
        alive = alive & take
        accepted = accepted + alive

    if rule == BLOCK and draft is not None and R > 0 and D > 0:
        # The largest i that stands, tried from the back; weights[:, i] > 0 as far as the chain was walked.
        n = torch.where(by_block, zeros, accepted)
        undecided = by_block.clone()
        for i in range(K, -1, -1):
            w, i_th = weights[:, i], (start + i).clamp(0, max(D - 1, 0))
            p = p_source.rows(first_row + i)[0]
            x = draft_tokens[i_th].long().clamp(0, vocab - 1)
            q, _ = q_source.rows(i_th, x)
            mass = excess(p, q, w).sum(1)
            u = _rows.uniforms(seeds, anchor, 1, zeros + i - 1, 1)[:, 0]
            stands = torch.where(has_q[:, i] & (w < 1), u * (mass + 1 - w) < mass, (w >= 1) | (u < w))
            chosen = undecided & (w > 0) & (stands | (i == 0))
            n = torch.where(chosen, i, n)
            undecided = undecided & ~chosen
            weighted = torch.where(has_q[:, i, None], residual(p, q, w), p)
            token = _rows.race(weighted, seeds, anchor + i, 2, zeros)
            out[:, i] = torch.where(chosen, token, out[:, i])
            log_p[:, i] = torch.where(chosen, p.gather(1, token[:, None])[:, 0].log(), log_p[:, i])
            drawn = torch.where(chosen, p_source.sampled_status(first_row + i), 0)
            states[:, i] |= drawn.to(torch.int32)
        accepted = n

    emitted = torch.where((accepted == d) & (not emit_bonus), accepted, accepted + 1)
    written = (k < emitted[:, None]) & ~rowless[:, None]
    lost = rowless[:, None] & (k == 0)
    tokens.copy_(torch.where(written, out, torch.where(lost, 0, -1)))
    if logprobs is not None:
        logprobs.copy_(torch.where(written, log_p, torch.where(lost, -torch.inf, 0.0)))
    if cutoff is not None:
        for into, field, value in zip(
            (cutoff, row_max, log_mass), found, (torch.inf, -torch.inf, -torch.inf), strict=True
        ):
            into.copy_(torch.where(written, field, torch.where(lost, value, 0.0)))
    for i in range(K + 1):
        state = torch.where(written[:, i], state | states[:, i], state)
    num_accepted.copy_(accepted)
    num_emitted.copy_(torch.where(rowless, 1, emitted))
    status.copy_(state)


_backends.register_eager("verify_chain", verify_chain)
