"""Topologies of draft trees: parents, and the retrieve triple of EAGLE and SGLang."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks


class Retrieve(NamedTuple):
    """`index` int64 [B, N]: row of each node in flattened target rows, b * N + node · `next_token` int64 [B, N]: first child ·
    `next_sibling` int64 [B, N]: the next child of the same parent; -1 where there is none, and for nodes that are not there."""

    index: Tensor
    next_token: Tensor
    next_sibling: Tensor


def retrieve_from_parents(parents: Tensor) -> Retrieve:
    """The triple that EAGLE's and SGLang's verification take, of padded trees.

    parents: int32/int64 [B, N - 1], parent of node 1 + column (0: the root; smaller than the node; -1: not there, nor what hangs
    from it), as `verify_tree` takes them flattened. No host sync.

    >>> retrieve_from_parents(torch.tensor([[0, 0, 1]]))[1:]
    (tensor([[ 1,  3, -1, -1]]), tensor([[-1,  2, -1, -1]]))
    """
    op = "retrieve_from_parents"
    if not isinstance(parents, Tensor) or parents.dim() != 2 or parents.dtype not in _checks.INDEX_DTYPES:
        _checks.fail(op, "parents", "int32 or int64 [B, N - 1]", parents)
    B, N = parents.shape[0], parents.shape[1] + 1
    node = torch.arange(N, device=parents.device)
    parent = _present(parents.long())
    both = (parent[:, :, None] == parent[:, None, :]) & (parent[:, :, None] >= 0)
    later = node[None, None, :] > node[None, :, None]
    next_sibling = torch.where(both & later, node, N).amin(2)
    child = torch.where(parent[:, None, :] == node[None, :, None], node, N).amin(2)
    none = torch.full_like(child, -1)
    index = torch.arange(B * N, device=parents.device).view(B, N)
    return Retrieve(index, torch.where(child < N, child, none), torch.where(next_sibling < N, next_sibling, none))


def parents_from_retrieve(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """int64 [B, N - 1]: the parents behind a retrieve triple, -1 for nodes that nothing leads to. No host sync.

    next_token, next_sibling: int32/int64 [B, N], node numbers or -1. Siblings must be chained in ascending order and children
    come after their parents (EAGLE's and SGLang's builders do both): that is the order in which `verify_tree` tries them. On
    CPU tensors a link that goes back or out of range raises ValueError; elsewhere it is not followed.

    >>> parents_from_retrieve(torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]]))
    tensor([[0, 0, 1]])
    """
    op = "parents_from_retrieve"
    for name, value in (("next_token", next_token), ("next_sibling", next_sibling)):
        if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in _checks.INDEX_DTYPES:
            _checks.fail(op, name, "int32 or int64 [B, N]", value)
    if next_token.shape != next_sibling.shape or next_token.shape[1] < 1:
        _checks.fail(op, "next_sibling", f"[B, N] like next_token {list(next_token.shape)}", next_sibling)
    B, N = next_token.shape
    node = torch.arange(N, device=next_token.device)
    if next_token.device.type == "cpu" and not torch.compiler.is_compiling():
        for name, value in (("next_token", next_token), ("next_sibling", next_sibling)):
            wrong = (value >= N) | ((value >= 0) & (value <= node)) | (value < -1)
            if bool(wrong.any()):
                b, n = wrong.nonzero()[0].tolist()
                _checks.fail(
                    op, name, f"-1 or a later node than its own, below N={N}", f"{int(value[b, n])} at [{b}, {n}]"
                )
    # One spare column takes the links that lead nowhere.
    parent = torch.full((B, N + 1), -1, dtype=torch.int64, device=next_token.device)
    reached = torch.zeros_like(parent, dtype=torch.bool)
    reached[:, 0] = True
    for n in range(N):  # ascending: a node is known before what it leads to
        for link, above in ((next_token[:, n], None), (next_sibling[:, n], parent[:, n])):
            follows = reached[:, n] & (link > n) & (link < N)
            to = torch.where(follows, link.long(), N)[:, None]
            value = torch.full_like(to, n) if above is None else above[:, None].clone()
            parent.scatter_(1, to, value)
            reached.scatter_(1, to, torch.ones_like(to, dtype=torch.bool))
        reached[:, N] = False
    return parent[:, 1:N]


def _present(parents: Tensor) -> Tensor:
    """int64 [B, N]: the root's -2, then parents, -1 for nodes that are not there or hang from one that is not."""
    out = torch.nn.functional.pad(parents, (1, 0), value=-2)
    known = out == -2
    for n in range(1, out.shape[1]):
        up = out[:, n]
        here = (up >= 0) & (up < n) & known.gather(1, up.clamp(0, out.shape[1] - 1)[:, None])[:, 0]
        out[:, n] = torch.where(here, up, -1)
        known[:, n] = here
    return out
