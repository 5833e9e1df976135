"""What a target or draft row means as a distribution, and the decisions that are made on one."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .nucleus import RowNucleus, row_nucleus, row_probs, scaled
from .params import STATUS_EMPTY_ROW, STATUS_NAN, RowParams, clean_logits, request_params
from .sample import race, to_target_vocab


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


def excess(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """max(0, weight * p - q) [V]. Entries of q that are NaN or negative count as 0."""
    return (weight * p - finite(q)).clamp_min(0.0)


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """`excess`, unnormalised; p itself where nothing is left of it (p = q)."""
    r = excess(p, q, weight)
    return r if r.any() else p


def finite(q: Tensor) -> Tensor:
    return torch.nan_to_num(q, nan=0.0, posinf=math.inf).clamp_min(0.0)


def one_hot(token: int, vocab: int) -> Tensor:
    q = torch.zeros(vocab, dtype=torch.float64)
    q[token] = 1.0
    return q


class TargetRow(NamedTuple):
    p: Tensor
    nucleus: RowNucleus


def target_row(row: Tensor, params: RowParams, filter_order: str, is_probs: bool) -> TargetRow:
    if not is_probs:
        nuc = row_nucleus(row, params, filter_order)
        return TargetRow(row_probs(row, nuc, params), nuc)
    p = row.detach().cpu().double()
    return TargetRow(torch.where(p > 0, p, torch.zeros_like(p)), RowNucleus(0.0, 0.0, 0.0, 0, math.inf))


def sampled_probs_status(row: Tensor) -> int:
    """A row given as probabilities is looked at as a whole only where a token is drawn from it."""
    return (STATUS_NAN if bool(torch.isnan(row).any()) else 0) | (0 if bool((row > 0).any()) else STATUS_EMPTY_ROW)


class DraftRow(NamedTuple):
    q: Tensor | None
    """q over target ids, float64 [V]; None if the row cannot be used."""
    margin: float


class DraftSource:
    """Where q of a draft comes from: logits with the draft's parameters, a saved nucleus, probabilities, or one-hot."""

    def __init__(self, vocab, logits, rows, nucleus, probs, params, target_to_draft, filter_order):
        self.vocab, self.logits, self.rows, self.saved, self.probs = vocab, logits, rows, nucleus, probs
        self.params, self.target_to_draft, self.filter_order = params, target_to_draft, filter_order

    def deterministic(self, b: int) -> bool:
        """Whether request b's drafts are one-hot: no rows are given, or they were drawn at temperature 0."""
        if self.logits is None:
            return self.probs is None
        return request_params(self.params, b).greedy

    def row(self, j: int, b: int, token: int) -> DraftRow:
        """q row of draft j (flat index) of request b."""
        source = self.logits if self.logits is not None else self.probs
        if source is None:
            return DraftRow(one_hot(token, self.vocab), math.inf)
        source = source.reshape(-1, source.shape[-1])
        index = j if self.rows is None else (int(self.rows[j]) if j < self.rows.numel() else -1)
        if not 0 <= index < source.shape[0]:
            return DraftRow(None, math.inf)
        if self.probs is not None:
            q = to_target_vocab(source[index].detach().cpu().double(), self.target_to_draft, self.vocab)
            return DraftRow(None if not math.isfinite(float(q[token])) else q, math.inf)
        params = request_params(self.params, b)
        if params.greedy:
            return DraftRow(one_hot(token, self.vocab), math.inf)
        if self.saved is None:
            nuc = row_nucleus(source[index], params, self.filter_order)
            if nuc.status:
                return DraftRow(None, math.inf)
            q, margin = row_probs(source[index], nuc, params), nuc.margin
        else:
            if j >= self.saved[0].numel():
                return DraftRow(None, math.inf)
            cutoff, row_max, log_mass = (float(field[j]) for field in self.saved)
            if math.isnan(cutoff) or math.isnan(row_max) or row_max == -math.inf or not math.isfinite(log_mass):
                return DraftRow(None, math.inf)
            z, _ = clean_logits(source[index])
            q = torch.exp(scaled(z, row_max, params.temperature) - log_mass)
            q, margin = torch.where(z >= cutoff, q, torch.zeros_like(q)), math.inf
        return DraftRow(to_target_vocab(q, self.target_to_draft, self.vocab), margin)


def race_signed(signed: Tensor, error: Tensor, noise: Tensor) -> tuple[int, float]:
    """Winner of the race over max(0, `signed`), and its margin: `error` [V] is by how much a weight changes with a relative
    error of 1 of the probabilities behind it; 0 says that a token can never race."""
    weights = signed.clamp_min(0.0)
    token, margin = race(weights, noise)
    if not margin >= 0 or not weights[token] > 0:
        return token, math.inf
    # A token ties the winner when its weight is what its noise needs; the winner's own weight changes meanwhile.
    need = noise * float(weights[token] / noise[token])
    reach = (need - signed) / (error + need * float(error[token] / weights[token]))
    reach[token] = float(weights[token] / error[token])  # the winner's weight vanishes
    return token, min(reach[(error > 0) & reach.isfinite()].tolist(), default=math.inf)


def race_residual(p: Tensor, q: Tensor, noise: Tensor, weight: float = 1.0, errors: float = 1.0) -> tuple[int, float]:
    """Winner of the race over `residual`, and its margin. `errors`: by how many relative errors of the probabilities
    weight * p may be wrong (1 where the weight is exact)."""
    if not excess(p, q, weight).any():
        return race(p, noise)
    mine, theirs = weight * p, finite(q)
    return race_signed(mine - theirs, torch.where(p > 0, errors * mine + theirs, torch.zeros_like(p)), noise)
