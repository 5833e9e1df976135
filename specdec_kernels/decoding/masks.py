"""Where the tokens of a forward stand and what they attend, for rows of different lengths and for trees of drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cache import RowCache
from .transfers import on_device


class TreeShape(NamedTuple):
    """Who follows whom in a tree whose last q nodes are the tokens of a forward, its first p the last entries of each row's
    cache (none, p = 0, where a tree goes through in one forward). With L the row's length without them:
    `depth` int64 [B, p + q]: a node's position is L + depth · `visible` bool [B, q, p + q]: token i attends node j, itself
    included; the L entries before the tree are all attended."""

    depth: Tensor
    visible: Tensor


def row_positions(
    cache: RowCache, counts: list[int], width: int, device: torch.device, tree: TreeShape | None = None
) -> tuple[Tensor, Tensor]:
    """Cache entries that a forward of `width` tokens per row writes, and the positions to embed there; int64 [B, width].

    Without a tree they differ in padding alone, which repeats its row's last position: a row near the model's limit may be
    padded to the width of another one, past the last row of a learned position table.
    """
    offset = torch.arange(width, device=device)
    start = cache.lengths_tensor[:, None]
    index = start + offset
    if tree is not None:
        earlier = tree.depth.shape[1] - width
        return index, start - earlier + tree.depth[:, earlier:]
    if all(n == width for n in counts):
        return index, index
    last = on_device(counts, torch.int64, device)[:, None] - 1
    return index, start + torch.minimum(offset, last.clamp_min(0))


def wanted_rows(counts: list[int], width: int, last_only: bool, device: torch.device) -> Tensor | None:
    """Rows of a flattened [B * width] forward whose logits are wanted, int64 [R]; None for all of them."""
    if last_only:
        if width == 1:
            return None
        rows = [b * width + max(n, 1) - 1 for b, n in enumerate(counts)]
    elif all(n == width for n in counts):
        return None
    else:
        rows = [b * width + i for b, n in enumerate(counts) for i in range(n)]
    return on_device(rows, torch.int64, device)


class Masks:
    """The masks of a model's layers.

    kinds: the layers' types · window: tokens that a "sliding_attention" layer reads, its own included.
    """

    def __init__(self, kinds: list[str], window: int | None):
        self.kinds, self.window = sorted(set(kinds)), window

    def __call__(
        self, cache: RowCache, index: Tensor, positions: Tensor, dtype: torch.dtype, tree: TreeShape | None = None
    ) -> Tensor | dict[str, Tensor] | None:
        """None where causal attention over the returned entries needs no mask, an additive mask [B or 1, 1, q, n], or one per
        layer type.

        index, positions: of each query, as `row_positions` gives them.
        """
        count = index.shape[1]
        end, budget = cache.max_length + count, cache.budget
        if budget is not None and budget >= end:
            budget = None
        plain = budget is None and self.kinds == ["full_attention"] and cache.uniform
        if tree is None and plain and (count == 1 or cache.max_length == 0):
            return None
        key = cache.key_positions(count)
        if key.dim() > 1:
            key = key[:, None]
        if tree is None:
            query, hidden = index[:, :, None], key > index[:, :, None]
        else:
            query = positions[:, :, None]
            key, hidden = _tree_keys(key, cache.lengths_tensor[:, None], tree)
        masks = {}
        for kind in self.kinds:
            out = hidden
            if kind == "sliding_attention":
                out = out | (key <= query - self.window)
            if budget is not None:
                out = out | ((key <= query - budget) & (key >= cache.sinks))
            masks[kind] = torch.zeros((len(out), 1, *out.shape[1:]), dtype=dtype, device=key.device).masked_fill_(
                out[:, None], torch.finfo(dtype).min
            )
        # One causal mask for a model of both kinds would silently widen its windows.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _tree_keys(key: Tensor, length: Tensor, tree: TreeShape) -> tuple[Tensor, Tensor]:
    """Positions [B, 1, n] of the entries `key` ([n] or [B, 1, n]) and what they hide from the tree's tokens, bool [B, q, n]."""
    (batch, nodes), count = tree.depth.shape, tree.visible.shape[1]
    start = (length - (nodes - count))[:, :, None]
    entry = key.expand(batch, 1, key.shape[-1])
    node = entry - start
    own = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    seen = tree.visible.gather(2, node.expand(-1, count, -1))
    depth = tree.depth[:, None].gather(2, node)
    return torch.where(own, start + depth, entry), torch.where(own, ~seen, entry >= start)
