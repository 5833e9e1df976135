"""One token per row by an exponential race: the winner is argmax over kept tokens of log p_v - log e_v, e_v ~ Exp(1).

P(winner = v) = p_v / sum(p): the minimum of independent exponentials of rates p_v is v with that probability. No
normaliser and no prefix sum is needed, so the winner does not depend on tiling or batch.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import rng
from .nucleus import Nucleus, row_nucleus, row_probs
from .params import STATUS_EMPTY_ROW, clean_logits, request_params


class SampleResult(NamedTuple):
    """tokens int32 [N] in [0, V) · logprobs float64 [N], log p of the token (-inf for an empty row) · both [N, num_samples] if
    more were asked for · nucleus [N] ·
    status int32 [N] · margin float64 [N], see `race` and `NucleusResult`."""

    tokens: Tensor
    logprobs: Tensor
    nucleus: Nucleus
    status: Tensor
    margin: Tensor


def race(weights: Tensor, noise: Tensor, condition: Tensor | None = None) -> tuple[int, float]:
    """Winner of the race among tokens of positive weight (ties: lowest id; id 0 if there is none), and its margin.

    The margin is the smallest relative error of the weights that could change the winner, to first order:
    min over the others of (score gap) / (condition of winner + condition of the other), where `condition` [V] says by how
    much a relative error of the probabilities behind a weight is magnified in it (1 for a plain p). A lone token has
    margin inf.
    """
    score = torch.where(weights > 0, weights, torch.ones_like(weights)).log() - noise.log()
    score = torch.where(weights > 0, score, torch.full_like(score, -torch.inf))
    token = int(score.argmax())  # the first maximum, so the lowest id
    if score[token] == -torch.inf:
        return 0, math.inf
    if condition is None:
        condition = torch.ones_like(weights)
    gap = (score[token] - score) / (condition[token] + condition)
    gap[token] = math.inf
    gap[weights <= 0] = math.inf
    return token, float(gap.min())


def sample(
    logits: Tensor,
    params,
    position: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    stream: int = rng.STREAM_SAMPLE,
    ids: Tensor | None = None,
    num_samples: int = 1,
    target_to_draft: Tensor | None = None,
    filter_order: str = "hf",
) -> SampleResult:
    """One token for each row of `logits` [N, V], or `num_samples` of them without replacement.

    `position` int64 [N], 0 where None: the row's absolute position (stream 2) or its step's anchor (stream 0, with the
    draft offset in `ids` [N]). `rows` [N] maps a row to its request. With `target_to_draft` [Vt] the row is over a reduced
    vocabulary; noise is keyed by target ids and the token returned is a target id.

    With `num_samples` above 1 tokens and logprobs are [N, num_samples], in the order in which the race is won: each next one
    is drawn from p without those before it (Gumbel top-k). Where no token is left: -1 and -inf. A greedy row gives its
    largest logits in order, the limit of this for T to 0.
    """
    cutoff, row_max, log_mass, tokens, logprobs, status, margins = [], [], [], [], [], [], []
    for n in range(logits.shape[0]):
        p_n = request_params(params, int(rows[n]) if rows is not None else n)
        nuc = row_nucleus(logits[n], p_n, filter_order)
        probs, margin = row_probs(logits[n], nuc, p_n), nuc.margin
        if p_n.greedy:  # the order of the values, as weights of a race that needs no noise
            values, rank = torch.unique(clean_logits(logits[n])[0], return_inverse=True)
            probs = torch.where(values == -math.inf, 0.0, torch.arange(1.0, len(values) + 1, dtype=torch.float64))[rank]
        if target_to_draft is not None:
            largest = float(probs.max())
            probs = to_target_vocab(probs, target_to_draft)
            if p_n.greedy and float(probs.max()) < largest:
                probs.zero_()  # the maximum is no target's
        pos = int(position[n]) if position is not None else 0
        noise = rng.race_noise(p_n.seed, pos, stream, int(ids[n]) if ids is not None else 0, probs.numel())
        left, drawn, log_p = probs.clone(), [], []
        for k in range(num_samples):
            if not left.any():
                drawn.append(-1 if k else 0)
                log_p.append(-math.inf)
                continue
            if p_n.greedy:
                drawn.append(int(left.argmax()))
                log_p.append(-math.inf if k else 0.0)
            else:
                token, gap = race(left, noise)
                margin = min(margin, gap)
                drawn.append(token)
                log_p.append(math.log(float(probs[token])))
            left[drawn[-1]] = 0.0
        tokens.append(drawn)
        logprobs.append(log_p)
        status.append(nuc.status if probs.any() else nuc.status | STATUS_EMPTY_ROW)
        margins.append(margin)
        cutoff.append(nuc.cutoff), row_max.append(nuc.row_max), log_mass.append(nuc.log_mass)
    f64 = torch.float64
    shape = (-1,) if num_samples == 1 else (-1, num_samples)
    return SampleResult(
        torch.tensor(tokens, dtype=torch.int32).reshape(shape),
        torch.tensor(logprobs, dtype=f64).reshape(shape),
        Nucleus(torch.tensor(cutoff, dtype=f64), torch.tensor(row_max, dtype=f64), torch.tensor(log_mass, dtype=f64)),
        torch.tensor(status, dtype=torch.int32),
        torch.tensor(margins, dtype=f64),
    )


def to_target_vocab(probs: Tensor, target_to_draft: Tensor | None, vocab: int | None = None) -> Tensor:
    """A draft row [Vd] as a row over target ids [V]; 0 where `target_to_draft` (or the shorter row) has no entry."""
    if target_to_draft is None:
        out = torch.zeros(vocab, dtype=probs.dtype)
        n = min(vocab, probs.numel())
        out[:n] = probs[:n]
        return out
    index = target_to_draft.to("cpu", torch.int64)
    inside = (index >= 0) & (index < probs.numel())
    return torch.where(inside, probs[index.clamp(0, probs.numel() - 1)], torch.zeros(index.numel(), dtype=probs.dtype))
