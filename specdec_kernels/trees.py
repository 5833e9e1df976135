"""Topologies of draft trees: parents, the retrieve triple of EAGLE and SGLang, and trees whose shape is fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from .eager._masks import ancestors, packed
from .verify_tree import MAX_NODES


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


class StaticTree(NamedTuple):
    """A tree whose shape is the same at every step, of n nodes behind the root, node 0: `parents` int64 [n], node numbers ·
    `depth` int32 [n + 1] · `rank` int64 [n]: which of the candidates of its depth a node is, 0 the likeliest ·
    `mask` bool [n + 1, n + 1] and `packed_mask` int32 [n + 1, ceil((n + 1) / 32)], as those of `DraftTree`."""

    parents: Tensor
    depth: Tensor
    rank: Tensor
    mask: Tensor
    packed_mask: Tensor


def static_tree(choices: Sequence[Sequence[int]], device: torch.device | str | None = None) -> StaticTree:
    """The tree of a list of choices as Medusa (2401.10774) writes them: each node by the ranks on its path from the root, so
    (0, 1) is the second candidate of depth 2 behind the first of depth 1.

    choices: 1 to 128 of them in any order, none twice, each with every node on its path; ValueError names the entry that is
    wrong. Nodes are numbered by depth, then by their ranks, so siblings are tried by rank. Made on the host, once. B requests
    are verified with `parents.repeat(B)`, by rule "target_only": top-k candidates are not drawn from q.

    >>> tree = static_tree([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    >>> tree.parents, tree.rank
    (tensor([0, 0, 1, 1, 2]), tensor([0, 1, 0, 1, 0]))
    """
    op = "static_tree"
    if not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_NODES:
        _checks.fail(op, "choices", f"a list of 1 to {MAX_NODES} tuples of ranks", choices)
    known: set[tuple[int, ...]] = set()
    for i, choice in enumerate(choices):
        ranks = isinstance(choice, (list, tuple)) and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in choice)
        if not ranks or not choice:
            _checks.fail(op, f"choices[{i}]", "a tuple of ranks, ints in [0, 2^31), one or more", choice)
        if tuple(choice) in known:
            _checks.fail(op, f"choices[{i}]", "there once", choice)
        known.add(tuple(choice))
    for i, choice in enumerate(choices):
        if len(choice) > 1 and tuple(choice[:-1]) not in known:
            _checks.fail(op, f"choices[{i}]", f"given with the node above it, {tuple(choice[:-1])}", choice)
    nodes = sorted(known, key=lambda choice: (len(choice), choice))
    number = {(): 0, **{choice: node for node, choice in enumerate(nodes, 1)}}
    parents = torch.tensor([number[choice[:-1]] for choice in nodes])
    depth, mask = ancestors(parents[None])
    tree = StaticTree(parents, depth[0], torch.tensor([choice[-1] for choice in nodes]), mask[0], packed(mask[0]))
    return StaticTree(*(t.to(device) for t in tree))


def static_tree_tokens(tree: StaticTree, candidates: Tensor) -> Tensor:
    """[B, n]: the token of each node of a static tree, from the likeliest ids of each depth. No host sync.

    candidates: int32/int64 [B, D, k], the k likeliest ids that a step's heads give for each depth 1..D, on the tree's device. A
    node that is deeper than D or of a rank past k gets -1, which `verify_tree` does not accept.

    >>> static_tree_tokens(static_tree([(0,), (1,), (0, 1)]), torch.tensor([[[7, 8], [4, 5]]]))
    tensor([[7, 8, 5]])
    """
    op = "static_tree_tokens"
    if not isinstance(tree, StaticTree):
        _checks.fail(op, "tree", "a StaticTree", tree)
    device = tree.rank.device
    fits = isinstance(candidates, Tensor) and candidates.dim() == 3 and candidates.dtype in _checks.INDEX_DTYPES
    if not fits or candidates.device != device or candidates.shape[1] * candidates.shape[2] == 0:
        _checks.fail(op, "candidates", f"int32 or int64 [B, D >= 1, k >= 1] on {device}", candidates)
    D, k = candidates.shape[1:]
    level = tree.depth[1:].long() - 1
    tokens = candidates[:, level.clamp_max(D - 1), tree.rank.clamp_max(k - 1)]
    return torch.where((level < D) & (tree.rank < k), tokens, -1)


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
