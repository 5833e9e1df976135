"""Who attends whom in a tree: ancestors from parents, and rows of bits."""

import torch
from torch import Tensor


def ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(depth int32 [B, n + 1], mask bool [B, n + 1, n + 1]) of parents [B, n], -1 for nodes that are not there: their depth is
    -1 and they attend themselves alone."""
    B, n = parents.shape
    node = torch.arange(n + 1, device=parents.device)
    parent = torch.nn.functional.pad(parents.long(), (1, 0))
    mask = torch.eye(n + 1, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    # What is within 2^k steps, and the node 2^k steps up; the root and what is not there lead to themselves.
    jump = torch.where(parent >= 0, parent, node)
    for _ in range(n.bit_length()):
        mask = mask | mask.gather(1, jump[:, :, None].expand_as(mask))
        jump = jump.gather(1, jump)
    depth = mask.sum(2, dtype=torch.int32) - 1
    return torch.where(parent >= 0, depth, -1), mask


def packed(mask: Tensor) -> Tensor:
    """int32 [.., ceil(n / 32)]: bit j % 32 of word j // 32 is mask[.., j]."""
    n = mask.shape[-1]
    words = torch.nn.functional.pad(mask, (0, -n % 32)).to(torch.int32).unflatten(-1, (-1, 32))
    return (words << torch.arange(32, dtype=torch.int32, device=mask.device)).sum(-1, dtype=torch.int32)
