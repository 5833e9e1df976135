"""A transformers cache in which every row has its own length, and the check of which models it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 256
_ATTENTION = ("full_attention", "sliding_attention")
# Recurrent models whose configs do not list their layers' types.
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm", "jamba", "bamba", "zamba")


class UnsupportedModel(ValueError):
    """The model keeps state that a per-row length cannot roll back, or reads positions that it cannot be given."""


class RowCache(Cache):
    """A transformers cache with a length per row; subclasses say where the entries are.

    A forward of q tokens per row writes row b's entries at positions lengths[b] .. lengths[b] + q - 1 and returns the first
    max(lengths) + q entries of every row; the lengths change only in `advance` and `rollback`. Callers call `reserve` before
    each forward, give explicit `position_ids` (an entry's index is its position) and a mask that hides index j from a query at
    position i < j. Sliding windows keep every entry and hide the old ones by mask: an entry that has left the window may be
    needed again after a rollback.

    With a `budget` queries read the last `budget` entries, their own included, and the first `sinks` alone, as `ModelForward`
    masks them; what nobody will read any more may be let go by `evict`.

    Args:
        config: the model's text config; refused by name where the model cannot be served (`check_supported`).
        batch_size: B.
        device: device of `lengths_tensor`.
        budget: entries that a query reads, or None for all.
        sinks: first entries of a row that stay in the budget's reach.

    Raises:
        UnsupportedModel: see `check_supported`.
    """

    def __init__(
        self, config, batch_size: int, *, device: torch.device | str = "cpu", budget: int | None = None, sinks: int = 0
    ):
        check_supported(config)
        super().__init__(layers=[])
        self.layers: list[Any] = []
        self.budget, self.sinks = budget, sinks
        self._device = torch.device(device)
        self._set([0] * batch_size)

    def _set(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.max_length = max(lengths, default=0)
        self.uniform = min(lengths, default=0) == self.max_length
        self._tensor: Tensor | None = None

    @property
    def lengths_tensor(self) -> Tensor:
        """int64 [B] on the device."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.lengths, dtype=torch.int64, device=self._device)
        return self._tensor

    def new_layer(self) -> CacheLayerMixin:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append(self.new_layer())
        return self.layers[layer_idx].update(key_states, value_states)

    def reserve(self, counts: Sequence[int], width: int) -> None:
        """Makes room for a forward of `width` tokens per row, of which the first counts[b] are row b's own."""

    def advance(self, counts: Sequence[int], counts_tensor: Tensor | None = None) -> None:
        """Takes the first counts[b] tokens of the last forward, of those that were reserved, into row b.

        counts_tensor: `counts` as int64 [B] on the device, for callers that had it before the forward.
        """
        before = self._tensor
        self._set([n + c for n, c in zip(self.lengths, counts, strict=True)])
        # A new tensor from the host would wait for the forward that was just launched.
        if before is not None and (counts_tensor is not None or len(set(counts)) == 1):
            self._tensor = before + (counts[0] if counts_tensor is None else counts_tensor)

    def rollback(self, counts: Sequence[int]) -> None:
        """Drops row b's last counts[b] tokens.

        Raises ValueError where a count is negative or larger than the row's length.
        """
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if not 0 <= count <= length:
                name = type(self).__name__
                raise ValueError(f"{name}.rollback: counts[{row}] must be in [0, {length}], got {count}")
        self._set([n - c for n, c in zip(self.lengths, counts, strict=True)])

    def evict(self) -> None:
        """Lets go of the entries that the budget has left behind, where the storage can. Rolling back further than to where
        this was called last may then need them, which is an error."""

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens of every row (transformers' convention since 5.24: n <= 0)."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"{type(self).__name__}.crop: tokens_to_remove must be <= 0, got {tokens_to_remove}; "
                "use rollback() for a count per row"
            )
        self.rollback([-tokens_to_remove] * len(self.lengths))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keeps `rows` (ascending), in that order."""
        self._set([self.lengths[r] for r in rows])

    def reset(self) -> None:
        """Empties every row; storage is kept."""
        self.rollback(self.lengths)


class _RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [B, H, capacity, D]; lengths live in the owning `RaggedCache`."""

    is_croppable = True
    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, owner: RaggedCache):
        super().__init__()
        self.owner = owner

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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.max_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.max_length

    def get_max_length(self) -> int:
        return -1


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

    def new_layer(self) -> CacheLayerMixin:
        return _RaggedLayer(self)

    def write_index(self, count: int) -> tuple[Tensor, Tensor]:
        """Row and column indices, int64 [B, 1] and [B, count], of the entries a forward of `count` tokens writes."""
        if self._index is None or self._index[0] != count:
            row = torch.arange(len(self.lengths), device=self._device)[:, None]
            column = self.lengths_tensor[:, None] + torch.arange(count, device=self._device)
            self._index = count, (row, column)
        return self._index[1]

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


def check_supported(config) -> None:
    """Raises UnsupportedModel, naming the reason, for models that a `RowCache` cannot serve.

    Supported: decoder-only models whose layers are all full or sliding-window attention with explicit positions, as far
    as the config tells; `ModelForward` also refuses models whose `forward` takes no `position_ids`.
    """
    name = getattr(config, "model_type", None) or type(config).__name__

    def refuse(reason: str):
        raise UnsupportedModel(f"decoding: model type {name!r} is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("encoder-decoder models keep a cross-attention cache")
    if getattr(config, "alibi", False) or name in ("bloom", "mpt"):
        refuse("ALiBi takes positions from the cache's scalar length, not from position_ids")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(_ATTENTION))
    if kinds:
        refuse(f"layers of type {', '.join(kinds)} (only {' and '.join(_ATTENTION)} can be rolled back by length)")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention")
    if name == "gpt_neo" or "local" in (getattr(config, "attention_layers", None) or ()):
        refuse("local attention takes its window from the number of keys, not from position_ids")
    if name == "dory":
        refuse("its loops append their own keys behind the last entry of the whole batch")
    if name in _RECURRENT:
        refuse("recurrent state cannot be rolled back by length")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers that share another layer's keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("bidirectional attention")
    if getattr(config, "cache_implementation", None) == "quantized":
        refuse("a quantised cache")
