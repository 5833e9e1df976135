"""Distances between the drafter's distribution and the target's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def soft_targets(last: Tensor, head: Tensor) -> Tensor:
    """The target's distribution over the rows of `head` (those of the ids that can be drafted, renormalised), [n, Vd].

    last: [n, H], what the LM head reads.
    """
    return F.linear(last, head).float().softmax(-1)


def log_softmax(logits: Tensor) -> Tensor:
    """In float32, whatever autocast made of the logits."""
    return logits.float().log_softmax(-1)


def distillation(logits: Tensor, p: Tensor, tv: float) -> dict[str, Tensor]:
    """CE(p, q) + tv (1 - sum min(p, q)) as "loss", and "overlap" and "hit", how often both have the same likeliest column; means.

    logits: [n, Vd] of q · p: float32 [n, Vd].
    """
    log_q = log_softmax(logits)
    shared = overlap(p, log_q.exp())
    loss = -(p * log_q).sum(-1).mean() + tv * (1 - shared).mean()
    hit = (log_q.argmax(-1) == p.argmax(-1)).float().mean()
    return {"loss": loss, "overlap": shared.mean().detach(), "hit": hit}


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum min(p, q) = 1 - TV: the probability that rule "token" accepts a draft of q; [n]."""
    return torch.minimum(p, q).sum(-1)
