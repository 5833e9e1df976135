"""What the rules of `specdec_kernels.lossy` ask of `verify_tree`'s walk in plain torch."""

import torch
from torch import Tensor

from .. import _schemas

TYPICAL, THRESHOLD, SYNTHETIC = (len(_schemas.TREE_RULES) + i for i in range(len(_schemas.LOSSY_RULES)))
LEAST_NORMAL = 2.0**-126
"""A probability up to float32's least normal number is none."""


def threshold(walk, node) -> tuple[Tensor, Tensor]:
    """(the accepted child or 0, what is left of p without the children)."""
    child, children = walk.pick(node.children, node.p, walk.coin(walk.node) * walk.factor, walk.bound)
    return child, walk.unless_nothing(walk.trees.without(node.p, children), node.p)


def synthetic(walk, node) -> tuple[Tensor, Tensor]:
    depth = walk.trees.depth[walk.trees.each, walk.node].clamp_min(0)
    rates = torch.nn.functional.pad(walk.rates.double(), (0, 1))  # the last one for all depths behind them
    accepted = walk.coin(walk.node) < rates[depth.clamp_max(rates.shape[0] - 1)]
    return torch.where(accepted, walk.trees.first(node.children), 0), node.p


def typical_end(walk) -> Tensor:
    """[B]: the deepest accepted node, of several the likeliest path's; 0 for greedy requests."""
    trees = walk.trees
    accepted = (trees.id == 0) & ~(walk.greedy | trees.rowless)[:, None]
    log_p = torch.zeros(accepted.shape, dtype=torch.float64, device=accepted.device)
    best = torch.zeros_like(walk.node)
    for child in range(1, trees.id.shape[0]):  # each comes after its parent
        at = trees.parent[:, child].clamp_min(0)
        asks = accepted[trees.each, at] & (trees.depth[:, child] > 0)
        if asks.device.type == "cpu" and not bool(asks.any()):
            continue
        walk.node = at
        node = walk.look(at)
        walk.note(asks, node.status)
        p_x = node.p[trees.each, trees.token[:, child].clamp(0, node.p.shape[1] - 1)]
        takes = asks & node.children[:, child] & (p_x > _typical_bound(node.p, walk.bound, walk.factor))
        accepted[:, child] = takes
        log_p[:, child] = log_p[trees.each, at] + torch.where(takes, p_x, 1.0).log()
        depth = trees.depth[trees.each, best]
        likelier = (trees.depth[:, child] == depth) & (log_p[:, child] > log_p[trees.each, best])
        best = torch.where(takes & ((trees.depth[:, child] > depth) | likelier), child, best)
    return best


def _typical_bound(p: Tensor, epsilon: float, delta: float) -> Tensor:
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(1)
    return (delta * (-entropy.clamp_min(0.0)).exp()).clamp(max=epsilon).clamp_min(LEAST_NORMAL)
