"""`verify_chain` in plain torch: positions in turn, a chunk of requests at once."""

import torch

from .. import _backends
from . import _rows
from .sample import gather_seed

TOKEN, COUPLED = 0, 1


class _Target:
    """Distribution of target rows, one per request at a time."""

    def __init__(self, target, is_probs, params, filter_order):
        self.target, self.is_probs, self.params, self.filter_order = target, is_probs, params, filter_order

    def rows(self, index):
        """(p float64 [B, V], status int32 [B], empty bool [B], three nucleus fields [B]) of rows `index` [B]."""
        raw = self.target[index.clamp(0, self.target.shape[0] - 1)]
        if not self.is_probs:
            r = _rows.filter_rows(raw, self.params, self.filter_order)
            return _rows.probs(r, self.params), r.status, r.empty, (r.cutoff, r.row_max, r.log_mass)
        p = torch.where(raw > 0, raw.double(), 0.0)
        zero = torch.zeros_like(p[:, 0])
        # A row of probabilities is looked at as a whole only where a token is drawn from it: see `sampled_status`.
        return p, torch.zeros_like(zero, dtype=torch.int32), torch.zeros_like(zero, dtype=torch.bool), (zero,) * 3

    def sampled_status(self, index):
        """Status bits [B] of rows of probabilities that a token is drawn from; 0 for logits, whose rows are read anyway."""
        if not self.is_probs:
            return torch.zeros_like(index, dtype=torch.int32)
        raw = self.target[index.clamp(0, self.target.shape[0] - 1)]
        return ((~(raw > 0).any(1)).int() * _rows.EMPTY_ROW + raw.isnan().any(1).int() * _rows.NAN).to(torch.int32)


class _Draft:
    """q of each request's i-th draft over target ids, and whether its row can be used."""

    def __init__(self, draft, is_probs, rows, nucleus, params, target_to_draft, filter_order, vocab):
        self.draft, self.is_probs, self.draft_rows, self.nucleus = draft, is_probs, rows, nucleus
        self.params, self.target_to_draft, self.filter_order, self.vocab = params, target_to_draft, filter_order, vocab

    def rows(self, flat, tokens):
        """(q float64 [B, V], usable bool [B]) of flat draft indices `flat` [B]; `tokens` [B] are in range."""
        one_hot = torch.zeros(flat.shape[0], self.vocab, dtype=torch.float64, device=flat.device)
        one_hot.scatter_(1, tokens[:, None], 1.0)
        usable = torch.ones_like(tokens, dtype=torch.bool)
        if self.draft is None:
            return one_hot, usable
        row, inside = flat, torch.ones_like(usable)
        if self.draft_rows is not None:
            row, inside = _lookup(self.draft_rows, flat)
            row = row.long()
        inside = inside & (row >= 0) & (row < self.draft.shape[0])
        if self.draft.shape[0] == 0:
            return one_hot, ~usable
        raw = self.draft[row.clamp(0, self.draft.shape[0] - 1)]
        if self.is_probs:
            q = _rows.to_target_vocab(raw.double(), self.target_to_draft, self.vocab)
            return q, inside & q.gather(1, tokens[:, None])[:, 0].isfinite()
        if self.nucleus is None:
            r = _rows.filter_rows(raw, self.params, self.filter_order)
            good = ~r.empty & ~r.nan
            q = _rows.probs(r, self.params)
        else:
            (cutoff, saved), (row_max, _), (log_mass, _) = (_lookup(field.double(), flat) for field in self.nucleus)
            good = saved & ~cutoff.isnan() & ~row_max.isnan() & (row_max > -torch.inf) & log_mass.isfinite()
            z = torch.where(raw.isnan(), -torch.inf, raw.double())
            x = _rows.scaled(z, row_max, self.params.temperature)
            q = torch.where(z >= cutoff[:, None], (x - log_mass[:, None]).exp(), 0.0)
        q = _rows.to_target_vocab(q, self.target_to_draft, self.vocab)
        greedy = self.params.greedy
        return torch.where(greedy[:, None], one_hot, q), (inside & good) | (inside & greedy)


def _lookup(table, index):
    """(table[index], index within the table); what lies outside reads as the last element, or 0 of an empty table."""
    inside = (index >= 0) & (index < table.shape[0])
    if table.shape[0] == 0:
        return torch.zeros_like(index, dtype=table.dtype), inside
    return table[index.clamp(0, table.shape[0] - 1)], inside


def residual(p, q):
    """max(0, p - q) [B, V], p where nothing is left; NaN and negative q count as 0."""
    r = (p - torch.where(q > 0, q, 0.0)).clamp_min(0.0)
    return torch.where((r > 0).any(1, keepdim=True), r, p)


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
    p_source = _Target(target, target_is_probs, params, filter_order)
    saved = None if draft_cutoff is None else (draft_cutoff, draft_row_max, draft_log_mass)
    q_source = _Draft(draft, draft_is_probs, draft_rows, saved, q_params, target_to_draft, filter_order, vocab)
    greedy = params.greedy if not target_is_probs else torch.zeros(B, dtype=torch.bool, device=device)

    cu = cu_num_draft.long()
    request = torch.arange(first, first + B, device=device)
    start = cu[:-1].clamp(0, D)
    end = torch.minimum(torch.maximum(cu[1:], start), torch.full_like(start, D))
    d = torch.minimum((end - start).clamp_max(K), R - 1 - start - request)
    rowless = d < 0
    state = torch.where((d >= 0) & (start == cu[:-1]) & (start + d == cu[1:]), 0, _rows.BAD_OFFSETS).to(torch.int32)
    first_row = start + request

    tokens.fill_(-1)
    for field in (logprobs, cutoff, row_max, log_mass):
        if field is not None:
            field.zero_()
    zeros = torch.zeros_like(d)
    accepted = zeros.clone()
    alive = ~rowless  # still accepting
    for i in range(K + 1):
        here = alive & (i < d)
        if not emit_bonus:
            visit = here
        else:
            visit = alive & (i <= d)
        if R == 0:
            break
        p, row_status, empty, fields = p_source.rows(first_row + i)
        state = torch.where(visit, state | row_status, state)
        flat = (start + i).clamp(0, max(D - 1, 0))
        draft_id = draft_tokens[flat].long() if D else zeros - 1
        placeholder = here & ~empty & ((draft_id < 0) | (draft_id >= vocab))
        state = torch.where(placeholder, state | _rows.PLACEHOLDER, state)
        x = draft_id.clamp(0, vocab - 1)
        plain = _rows.race(p, seeds, anchor + i, 2, zeros)
        token = plain
        if rule == TOKEN and i < K and D:
            q, usable = q_source.rows(flat, x)
            p_x, q_x = p.gather(1, x[:, None])[:, 0], q.gather(1, x[:, None])[:, 0]
            decides = here & ~empty & ~placeholder & ~greedy
            state = torch.where(decides & ~usable, state | _rows.BAD_Q_ROW, state)
            zero_q = decides & usable & ~(q_x > 0)
            state = torch.where(zero_q, state | _rows.ZERO_Q, state)
            tested = decides & usable & (q_x > 0)
            u = _rows.uniforms(seeds, anchor, 1, zeros + i, 1)[:, 0]
            take = tested & (p_x > 0) & ((p_x >= q_x) | (u * q_x < p_x))
            left = _rows.race(residual(p, q), seeds, anchor + i, 2, zeros)
            token = torch.where(take, x, torch.where(tested, left, plain))
            same = greedy & ~placeholder & (plain == draft_id)
            take = take | (here & ~empty & same)
        else:
            possible = p.gather(1, plain[:, None])[:, 0] > 0
            take = here & ~empty & ~placeholder & (plain == draft_id) & possible
        drawn = visit & (~take | (rule == COUPLED))
        state = torch.where(drawn, state | p_source.sampled_status(first_row + i), state)
        tokens[:, i] = torch.where(visit, token, tokens[:, i].long()).to(torch.int32)
        if logprobs is not None:
            log_p = p.gather(1, token[:, None])[:, 0].log().float()
            logprobs[:, i] = torch.where(visit, log_p, logprobs[:, i])
        if cutoff is not None:
            for field, value in zip((cutoff, row_max, log_mass), fields, strict=True):
                field[:, i] = torch.where(visit, value.float(), field[:, i])
        alive = alive & take
        accepted = accepted + alive
    tokens[:, 0] = torch.where(rowless, 0, tokens[:, 0])
    if logprobs is not None:
        logprobs[:, 0] = torch.where(rowless, -torch.inf, logprobs[:, 0])
    if cutoff is not None:
        for field, value in zip((cutoff, row_max, log_mass), (torch.inf, -torch.inf, -torch.inf), strict=True):
            field[:, 0] = torch.where(rowless, value, field[:, 0])
    num_accepted.copy_(accepted)
    num_emitted.copy_((tokens >= 0).sum(1))
    status.copy_(state)


_backends.register_eager("verify_chain", verify_chain)
