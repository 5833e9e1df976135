"""The trees of a batch as tensors [B, n + 1], node 0 first, and what is asked of sets of nodes (bool [B, n + 1])."""

import torch
from torch import Tensor

MAX_NODES = 128


class Trees:
    """`parent`, `depth` (-1: not there), `token`, and which nodes are `real` or a `placeholder`, of each request's tree."""

    def __init__(self, draft_tokens, parents, cu, num_rows: int, vocab: int, max_depth: int):
        B, device = cu.shape[0] - 1, cu.device
        total = min(draft_tokens.shape[0], parents.shape[0])
        n = min(MAX_NODES, total)
        self.start = cu[:-1].clamp(0, total)
        self.first_row = self.start + torch.arange(B, device=device)
        end = torch.minimum(torch.maximum(cu[1:], self.start), torch.full_like(self.start, total))
        count = torch.minimum((end - self.start).clamp_max(n), num_rows - 1 - self.first_row)
        self.rowless = count < 0
        self.bad = self.rowless | (self.start != cu[:-1]) | (self.start + count != cu[1:])
        self.each, self.id = torch.arange(B, device=device), torch.arange(n + 1, device=device)
        inside = (self.id >= 1) & (self.id <= count[:, None])
        flat = (self.start[:, None] + self.id - 1).clamp(0, max(total - 1, 0))
        none = torch.full_like(flat, -1)
        given = torch.where(inside, parents.long()[flat], none) if total else none
        self.token = torch.where(inside, draft_tokens.long()[flat], none) if total else none
        self.parent, self.depth = none.clone(), none.clone()
        self.depth[:, 0] = torch.where(self.rowless, -1, 0)
        for node in range(1, n + 1):
            up = given[:, node]
            above = self.depth.gather(1, up.clamp(0, n)[:, None])[:, 0]
            hangs = inside[:, node] & (up >= 0) & (up < node) & (above >= 0)
            here = hangs & (above < max_depth)
            self.bad = self.bad | (inside[:, node] & ((up >= node) | (up < -1))) | (hangs != here)
            self.parent[:, node] = torch.where(here, up, -1)
            self.depth[:, node] = torch.where(here, above + 1, -1)
        outside = (self.token < 0) | (self.token >= vocab)
        self.placeholder, self.real = (self.depth > 0) & outside, (self.depth > 0) & ~outside

    def children(self, node: Tensor) -> Tensor:
        return self.real & (self.parent == node[:, None])

    def has_placeholder(self, node: Tensor) -> Tensor:
        return (self.placeholder & (self.parent == node[:, None])).any(1)

    @staticmethod
    def first(nodes: Tensor) -> Tensor:
        """The lowest of each request's nodes, 0 where there is none."""
        return torch.where(nodes.any(1), nodes.int().argmax(1), 0)

    def token_of(self, node: Tensor) -> Tensor:
        """[B], 0 for a node that has none: an index, not an answer."""
        return self.token[self.each, node].clamp_min(0)

    def at_tokens(self, row: Tensor) -> Tensor:
        """Entries of rows [B, V] at each node's token, 0 for nodes that are not real."""
        return torch.where(self.real, row.gather(1, self.token.clamp(0, row.shape[1] - 1)), 0.0)

    def without(self, row: Tensor, nodes: Tensor) -> Tensor:
        """Rows [B, V] with 0 at the tokens of `nodes`."""
        vocab = row.shape[1]
        index = torch.where(nodes, self.token, vocab).clamp(0, vocab)
        return torch.nn.functional.pad(row, (0, 1)).scatter(1, index, 0.0)[:, :vocab]

    def distinct(self, nodes: Tensor) -> Tensor:
        """`nodes` without those whose token a lower one has."""
        same = (self.token[:, :, None] == self.token[:, None, :]) & nodes[:, None, :]
        return nodes & ~(same & (self.id[None, :] < self.id[:, None])).any(2)

    def path(self, node: Tensor, depth: int) -> Tensor:
        """[B, depth + 1]: the nodes from the root to `node`, 0 behind it."""
        nodes = torch.zeros(node.shape[0], depth + 1, dtype=torch.int64, device=node.device)
        for _ in range(depth + 1):
            at = self.depth[self.each, node].clamp_min(0)
            nodes.scatter_(1, at[:, None], node[:, None])
            node = torch.where(node > 0, self.parent[self.each, node], 0).clamp_min(0)
        return nodes
