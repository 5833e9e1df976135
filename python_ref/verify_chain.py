"""Speculative sampling over a chain of drafts: accept/reject, then a token from the residual or the bonus row.

Token rule (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draft x_i ~ q_i is accepted with probability
min(1, p_i(x_i) / q_i(x_i)); the first rejected row emits a token of (p_i - q_i)_+ / sum, and a chain accepted to its end
emits one of p_d. Coupled rule (Daliri et al. 2408.07978): row i samples y_i ~ p_i with the noise that plain sampling
would use, and x_i is accepted while x_i = y_i.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import rng
from .nucleus import Nucleus, RowNucleus, row_nucleus, row_probs, scaled
from .params import (
    STATUS_BAD_OFFSETS,
    STATUS_BAD_Q_ROW,
    STATUS_EMPTY_ROW,
    STATUS_NAN,
    STATUS_PLACEHOLDER,
    STATUS_ZERO_Q,
    RowParams,
    clean_logits,
    request_params,
)
from .sample import race, to_target_vocab

RULES = ("token", "coupled")


class VerifyResult(NamedTuple):
    """tokens int32 [B, K + 1], padded with -1 · num_accepted int32 [B] · num_emitted int32 [B] · status int32 [B] ·
    logprobs float64 [B, K + 1], log p of each emitted token (0 past num_emitted) · nucleus [B, K + 1] of the emitted rows
    (0 past num_emitted) · margin float64 [B]: the smallest relative error of the probabilities (p and q each) that could
    change any decision behind this request's output."""

    tokens: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    status: Tensor
    logprobs: Tensor
    nucleus: Nucleus
    margin: Tensor


class ChainLaw(NamedTuple):
    """What the token rule does with one request's drafts, before any randomness: `accept[i]` is the probability that draft
    i is accepted given that all before it were, `emit[i]` the distribution [V] of the token that follows i accepted drafts
    (row i's residual, or p where the rule says so; `emit[d]` is the bonus row). Enumerating these is enumerating the rule."""

    accept: list[float]
    emit: list[Tensor]


def accept_probability(p_x: float, q_x: float) -> float:
    """min(1, p(x) / q(x)); 0 where q(x) is not positive or p(x) = 0."""
    if not q_x > 0 or p_x == 0:
        return 0.0
    return 1.0 if p_x >= q_x else p_x / q_x


def accepts(coin: float, p_x: float, q_x: float) -> bool:
    """The test behind `accept_probability`: coin * q(x) < p(x), strictly, so that p(x) = 0 is never accepted."""
    if not q_x > 0 or p_x == 0:
        return False
    return p_x >= q_x or coin * q_x < p_x


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q), unnormalised; p itself where nothing is left of it (p = q). Entries of q that are NaN or negative
    count as 0."""
    r = (p - torch.nan_to_num(q, nan=0.0, posinf=math.inf).clamp_min(0.0)).clamp_min(0.0)
    return r if r.any() else p


def one_hot(token: int, vocab: int) -> Tensor:
    q = torch.zeros(vocab, dtype=torch.float64)
    q[token] = 1.0
    return q


class _DraftRow(NamedTuple):
    q: Tensor | None
    """q over target ids, float64 [V]; None if the row cannot be used."""
    margin: float


class _Drafts:
    """Where q of a draft comes from: logits with the draft's parameters, a saved nucleus, probabilities, or one-hot."""

    def __init__(self, vocab, logits, rows, nucleus, probs, params, target_to_draft, filter_order):
        self.vocab, self.logits, self.rows, self.saved, self.probs = vocab, logits, rows, nucleus, probs
        self.params, self.target_to_draft, self.filter_order = params, target_to_draft, filter_order

    def row(self, j: int, b: int, token: int) -> _DraftRow:
        """q row of draft j (flat index) of request b."""
        source = self.logits if self.logits is not None else self.probs
        if source is None:
            return _DraftRow(one_hot(token, self.vocab), math.inf)
        source = source.reshape(-1, source.shape[-1])
        index = j if self.rows is None else (int(self.rows[j]) if j < self.rows.numel() else -1)
        if not 0 <= index < source.shape[0]:
            return _DraftRow(None, math.inf)
        if self.probs is not None:
            q = to_target_vocab(source[index].detach().cpu().double(), self.target_to_draft, self.vocab)
            return _DraftRow(None if not math.isfinite(float(q[token])) else q, math.inf)
        params = request_params(self.params, b)
        if params.greedy:
            return _DraftRow(one_hot(token, self.vocab), math.inf)
        if self.saved is None:
            nuc = row_nucleus(source[index], params, self.filter_order)
            if nuc.status:
                return _DraftRow(None, math.inf)
            q, margin = row_probs(source[index], nuc, params), nuc.margin
        else:
            if j >= self.saved[0].numel():
                return _DraftRow(None, math.inf)
            cutoff, row_max, log_mass = (float(field[j]) for field in self.saved)
            if math.isnan(cutoff) or math.isnan(row_max) or row_max == -math.inf or not math.isfinite(log_mass):
                return _DraftRow(None, math.inf)
            z, _ = clean_logits(source[index])
            q = torch.exp(scaled(z, row_max, params.temperature) - log_mass)
            q, margin = torch.where(z >= cutoff, q, torch.zeros_like(q)), math.inf
        return _DraftRow(to_target_vocab(q, self.target_to_draft, self.vocab), margin)


def chain_law(p: list[Tensor], q: list[Tensor | None], drafts: list[int]) -> ChainLaw:
    """Acceptance probabilities and emission distributions of the token rule.

    `p`: d + 1 rows [V]; `q`: d rows [V], None for a row that cannot be used; `drafts`: d target ids, negative or >= V for
    a placeholder. Where a draft has no usable q (None, q(x) not > 0, placeholder) it is rejected and its row emits from p.
    """
    accept, emit = [], []
    for p_i, q_i, x in zip(p, q, drafts, strict=False):
        usable = 0 <= x < p_i.numel() and q_i is not None and bool(q_i[x] > 0)
        accept.append(accept_probability(float(p_i[x]), float(q_i[x])) if usable else 0.0)
        emit.append(residual(p_i, q_i) if usable else p_i)
    emit.append(p[len(drafts)])
    return ChainLaw(accept, [e / e.sum() for e in emit])


class _Row(NamedTuple):
    p: Tensor
    nucleus: RowNucleus


def _target_row(row: Tensor, params: RowParams, filter_order: str, is_probs: bool) -> _Row:
    if not is_probs:
        nuc = row_nucleus(row, params, filter_order)
        return _Row(row_probs(row, nuc, params), nuc)
    p = row.detach().cpu().double()
    return _Row(torch.where(p > 0, p, torch.zeros_like(p)), RowNucleus(0.0, 0.0, 0.0, 0, math.inf))


def _sampled_probs_status(row: Tensor) -> int:
    """A row given as probabilities is looked at as a whole only where a token is drawn from it."""
    return (STATUS_NAN if bool(torch.isnan(row).any()) else 0) | (0 if bool((row > 0).any()) else STATUS_EMPTY_ROW)


def _race_residual(p: Tensor, q: Tensor, noise: Tensor) -> tuple[int, float]:
    weights = residual(p, q)
    finite_q = torch.nan_to_num(q, nan=0.0).clamp_min(0.0)
    # log(p - q) magnifies a relative error of p and q by (p + q) / (p - q).
    magnified = (p + finite_q) / torch.where(weights > 0, weights, torch.ones_like(weights))
    token, margin = race(weights, noise, torch.ones_like(p) if weights is p else magnified)
    if weights is not p:  # the winner's own residual vanishes under an error of this size
        margin = min(margin, float((p[token] - finite_q[token]) / (p[token] + finite_q[token])))
    # A token just outside the support can enter it under an error of this size.
    outside = (p > 0) & (p <= finite_q) & (finite_q < 1)
    if weights is not p and bool(outside.any()):
        edge = ((finite_q - p) / (p + finite_q))[outside]
        margin = min(margin, float(edge.min()))
    return token, margin


def verify_chain(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_nucleus: Nucleus | None = None,
    draft_probs: Tensor | None = None,
    draft_params=None,
    target_to_draft: Tensor | None = None,
    target_probs: Tensor | None = None,
    rule: str = "token",
    max_draft: int | None = None,
    emit_bonus: bool = True,
    filter_order: str = "hf",
) -> VerifyResult:
    """One speculative step of B requests; arguments as `specdec_kernels.verify_chain`."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if (target_logits is None) == (target_probs is None):
        raise ValueError("exactly one of target_logits and target_probs must be given")
    if draft_logits is not None and (draft_probs is not None or draft_params is None):
        raise ValueError("draft_logits needs draft_params and excludes draft_probs")
    target = target_logits if target_logits is not None else target_probs
    vocab, num_rows = target.shape[1], target.shape[0]
    offsets = [int(v) for v in cu_num_draft]
    B, D = len(offsets) - 1, draft_tokens.numel()
    if max_draft is None:
        max_draft = min(max([0, *(offsets[b + 1] - offsets[b] for b in range(B))]), D)
    source = _Drafts(
        vocab, draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params, target_to_draft, filter_order
    )

    tokens = torch.full((B, max_draft + 1), -1, dtype=torch.int32)
    logprobs = torch.zeros(B, max_draft + 1, dtype=torch.float64)
    fields = torch.zeros(3, B, max_draft + 1, dtype=torch.float64)
    num_accepted, num_emitted, status = (torch.zeros(B, dtype=torch.int32) for _ in range(3))
    margins = torch.full((B,), math.inf, dtype=torch.float64)

    for b in range(B):
        start = min(max(offsets[b], 0), D)
        end = min(max(offsets[b + 1], start), D)
        d = min(end - start, max_draft, num_rows - 1 - start - b)
        state = 0 if (start, start + d) == (offsets[b], offsets[b + 1]) else STATUS_BAD_OFFSETS
        pb = request_params(params, b)
        anchor = int(position[b]) if position is not None else 0
        if d < 0:  # not even one row is there
            tokens[b, 0], num_emitted[b], status[b], logprobs[b, 0] = 0, 1, STATUS_BAD_OFFSETS, -math.inf
            fields[:, b, 0] = torch.tensor([math.inf, -math.inf, -math.inf], dtype=torch.float64)
            continue

        def emit(i: int, token: int, row: _Row) -> None:
            tokens[b, i] = token  # noqa: B023
            p_x = float(row.p[token])
            logprobs[b, i] = math.log(p_x) if p_x > 0 else -math.inf  # noqa: B023
            fields[:, b, i] = torch.tensor(row.nucleus[:3], dtype=torch.float64)  # noqa: B023

        margin, accepted = math.inf, 0
        for i in range(d + 1):
            if i == d and not emit_bonus:
                break
            row = _target_row(target[start + b + i], pb, filter_order, target_probs is not None)
            state |= row.nucleus.status
            margin = min(margin, row.nucleus.margin)
            if row.nucleus.status & STATUS_EMPTY_ROW:
                emit(i, 0, row)
                break
            greedy = pb.greedy and target_probs is None
            noise = rng.race_noise(pb.seed, anchor + i, rng.STREAM_SAMPLE, 0, vocab)
            if i == d:
                token, gap = race(row.p, noise)
                margin = min(margin, gap)
                if target_probs is not None:
                    state |= _sampled_probs_status(target[start + b + i])
                emit(i, token, row)
                break
            x = int(draft_tokens[start + i])
            placeholder = not 0 <= x < vocab
            if placeholder:
                state |= STATUS_PLACEHOLDER
            if rule == "coupled" or greedy or placeholder:
                token, gap = race(row.p, noise)
                margin = min(margin, gap)
                accepted_here = token == x and bool(row.p[token] > 0)
            else:
                q, q_margin = source.row(start + i, b, x)
                margin = min(margin, q_margin)
                if q is None or not q[x] > 0:
                    state |= STATUS_BAD_Q_ROW if q is None else STATUS_ZERO_Q
                    token, gap = race(row.p, noise)
                    margin = min(margin, gap)
                    accepted_here = False
                else:
                    p_x, q_x = float(row.p[x]), float(q[x])
                    coin = rng.coin(pb.seed, anchor, i)
                    accepted_here = accepts(coin, p_x, q_x)
                    if p_x > 0:
                        margin = min(margin, abs(math.log(coin) + math.log(q_x) - math.log(p_x)) / 2)
                    token = x
                    if not accepted_here:
                        token, gap = _race_residual(row.p, q, noise)
                        margin = min(margin, gap)
            if target_probs is not None and (rule == "coupled" or not accepted_here):
                state |= _sampled_probs_status(target[start + b + i])
            emit(i, token, row)
            if not accepted_here:
                break
            accepted += 1
        num_accepted[b] = accepted
        num_emitted[b] = int((tokens[b] >= 0).sum())
        status[b], margins[b] = state, margin
    return VerifyResult(tokens, num_accepted, num_emitted, status, logprobs, Nucleus(*fields), margins)
