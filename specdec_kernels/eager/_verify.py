"""What verification asks of target rows and draft rows, one row per request at a time."""

import torch

from . import _rows


class Target:
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


class Draft:
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


def excess(p, q, weight):
    """max(0, weight * p - q) [B, V]; NaN and negative q count as 0."""
    return (weight[:, None] * p - torch.where(q > 0, q, 0.0)).clamp_min(0.0)


def residual(p, q, weight):
    """`excess`, or p where nothing is left of it."""
    r = excess(p, q, weight)
    return torch.where((r > 0).any(1, keepdim=True), r, p)
