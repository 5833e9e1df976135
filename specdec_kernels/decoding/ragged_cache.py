"""A transformers cache with a length per row, one block of memory for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv_compact import kv_compact
from .cache import RowCache, RowLayer

_GROWTH = 256


class _RaggedLayer(RowLayer):
    """Keys and values of one attention layer, [B, H, capacity, D]; lengths live in the owning `RaggedCache`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty: a masked entry still meets the softmax as 0 * value, and 0 * NaN is NaN.
        batch, heads, _, _ = key_states.shape
        capacity = self.owner.capacity
        self.keys = key_states.new_zeros(batch, heads, capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[-1])
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, count = self.owner, key_states.shape[2]
        end = owner.max_length + count
        if end > self.keys.shape[2]:
            owner.capacity = -(-end // _GROWTH) * _GROWTH
            self.grow(max(owner.capacity, self.keys.shape[2] * 3 // 2))
        if owner.uniform:
            self.keys.narrow(2, owner.max_length, count).copy_(key_states)
            self.values.narrow(2, owner.max_length, count).copy_(value_states)
        else:
            row, column = owner.write_index(count)
            self.keys[row, :, column] = key_states.transpose(1, 2)
            self.values[row, :, column] = value_states.transpose(1, 2)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class RaggedCache(RowCache):
    """`RowCache` in one block of memory a row and layer: rolling drafts back changes lengths and moves no data; padded or
    rejected tokens are simply written over.

    Args:
        capacity: tokens per row to allocate at first; grows as needed.
        The others as in `RowCache`.
    """

    def __init__(self, config, batch_size: int, *, capacity: int = _GROWTH, **options):
        super().__init__(config, batch_size, **options)
        self.capacity = max(int(capacity), 1)

    def _set(self, lengths: list[int]) -> None:
        super()._set(lengths)
        self._index: tuple[int, tuple[Tensor, Tensor]] | None = None

    def new_layer(self) -> RowLayer:
        return _RaggedLayer(self)

    def write_index(self, count: int) -> tuple[Tensor, Tensor]:
        """Row and column indices, int64 [B, 1] and [B, count], of the entries a forward of `count` tokens writes."""
        if self._index is None or self._index[0] != count:
            row = torch.arange(len(self.lengths), device=self._device)[:, None]
            column = self.lengths_tensor[:, None] + torch.arange(count, device=self._device)
            self._index = count, (row, column)
        return self._index[1]

    def compact(self, path: Tensor) -> None:
        caches = [t.transpose(1, 2) for layer in self.layers for t in (layer.keys, layer.values)]
        kv_compact(caches, path, self.lengths_tensor)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keeps `rows` (ascending), in that order; their entries move to the front of the same storage."""
        used = max((self.lengths[r] for r in rows), default=0)
        for layer in self.layers:
            for name in ("keys", "values"):
                buffer = getattr(layer, name)
                # Ascending rows only move towards the front, so copying one by one never overwrites a row still needed.
                for new, old in enumerate(rows):
                    if new != old:
                        buffer[new, :, :used] = buffer[old, :, :used]
                setattr(layer, name, buffer[: len(rows)])
        super().select_rows(rows)
