"""`build_tree` in plain torch."""

import torch

from .. import _backends
from ._masks import ancestors, packed


def build_tree(log_probs, tokens, parents, node_tokens, node_parents, depth, index, mask, packed_mask) -> None:
    (B, C), n, device = log_probs.shape, node_tokens.shape[1], log_probs.device
    candidate = torch.arange(C, device=device)
    up, token = parents.long(), tokens.long()
    sound = (up >= 0) & (up <= candidate) & (token >= 0) & (token < 2**31) & ~log_probs.isnan()
    step = torch.where(sound, log_probs.clamp(max=0.0), -torch.inf)
    up = torch.where(sound, up, 0)
    # The root's score, then the candidates'. Level by level: one rounding after another, as every backend rounds them.
    # Whatever lies deeper than n has n better ones above it.
    score = torch.full((B, C + 1), -torch.inf, device=device)
    score[:, 0] = 0.0
    for _ in range(min(n, C)):
        score[:, 1:] = score.gather(1, up) + step
    best, order = score[:, 1:].sort(dim=1, descending=True, stable=True)
    kept = torch.where(best > -torch.inf, order, C)[:, :n].sort(dim=1).values
    kept = torch.nn.functional.pad(kept, (0, n - kept.shape[1]), value=C)
    there, at = kept < C, kept.clamp_max(C - 1)

    # Node numbers of the root and the candidates; the column behind them takes what is not there.
    number = torch.zeros(B, C + 2, dtype=torch.int64, device=device)
    number.scatter_(1, kept + 1, torch.arange(1, n + 1, device=device).expand(B, n))
    node_tokens.copy_(torch.where(there, token.gather(1, at), -1))
    node_parents.copy_(torch.where(there, number.gather(1, up.gather(1, at)), -1))
    index.copy_(torch.where(there, kept, -1))
    depths, attended = ancestors(node_parents)
    depth.copy_(depths)
    mask.copy_(attended)
    packed_mask.copy_(packed(attended))


_backends.register_eager("build_tree", build_tree)
