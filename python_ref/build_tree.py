"""The tree of the drafted candidates that are likeliest, each with all that it hangs from (EAGLE-2, 2406.16858).

A candidate's score is its cumulative log q, summed from the root in float32, one after another: the sums are part of the
definition. No step raises a score, so a candidate never ranks before the one that it hangs from, which was drafted earlier: the
best n are a tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """Fields as those of `specdec_kernels.DraftTree`."""

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    index: Tensor
    mask: Tensor
    packed_mask: Tensor


def build_tree(log_probs: Tensor, tokens: Tensor, parents: Tensor, num_nodes: int) -> DraftTree:
    """Arguments as `specdec_kernels.build_tree`."""
    trees = [_build(*request, num_nodes) for request in zip(log_probs, tokens.tolist(), parents.tolist(), strict=True)]
    tokens, parents, depth, index, mask, packed = zip(*trees, strict=True)
    i32 = torch.int32
    return DraftTree(
        torch.tensor(tokens, dtype=i32), torch.tensor(parents, dtype=i32), torch.tensor(depth, dtype=i32),
        torch.tensor(index, dtype=i32), torch.tensor(mask), torch.tensor(packed, dtype=i32),
    )  # fmt: skip


def scores(log_probs: Tensor, tokens: list[int], parents: list[int]) -> list[float]:
    """Cumulative log q of each candidate, -inf for those that are not there."""
    root = torch.zeros((), dtype=torch.float32)
    absent = torch.full_like(root, -torch.inf)
    out: list[Tensor] = []
    for c, (log_prob, token, parent) in enumerate(zip(log_probs, tokens, parents, strict=True)):
        if not 0 <= parent <= c or not 0 <= token < 2**31 or log_prob.isnan():
            out.append(absent)
        else:
            above = root if parent == 0 else out[parent - 1]
            out.append(above + log_prob.clamp(max=0.0))
    return [float(score) for score in out]


def _build(log_probs: Tensor, tokens: list[int], parents: list[int], n: int) -> tuple[list, ...]:
    score = scores(log_probs, tokens, parents)
    there = [c for c in range(len(score)) if score[c] > -torch.inf]
    kept = sorted(sorted(there, key=lambda c: (-score[c], c))[:n])
    number = {c: node for node, c in enumerate(kept, 1)}
    padding = [-1] * (n - len(kept))
    up = [0 if parents[c] == 0 else number[parents[c] - 1] for c in kept]

    attended = [[node] for node in range(n + 1)]  # the node, then what is above it
    for node, parent in enumerate(up, 1):
        attended[node] += attended[parent]
    depth = [len(above) - 1 for above in attended[: len(kept) + 1]]
    mask = [[j in above for j in range(n + 1)] for above in attended]
    return (
        [tokens[c] for c in kept] + padding,
        up + padding,
        depth + padding,
        kept + padding,
        mask,
        [[_word(row[first : first + 32]) for first in range(0, n + 1, 32)] for row in mask],
    )


def _word(bits: list[bool]) -> int:
    """The int32 whose bit j is bits[j]."""
    value = sum(1 << j for j, bit in enumerate(bits) if bit)
    return value - (1 << 32) if value >> 31 else value
