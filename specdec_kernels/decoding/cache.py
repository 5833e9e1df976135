"""What the decoder asks of a cache: a length per row, rolled back row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .support import check_supported
from .transfers import on_device

if TYPE_CHECKING:
    from .paged_attention import PagedForward

CACHES = ("ragged", "paged")


class RowLayer(CacheLayerMixin):
    """One attention layer of a `RowCache`, which has the lengths; subclasses say where its entries are."""

    is_croppable = True
    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, owner: Any):
        super().__init__()
        self.owner = owner

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.max_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.max_length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """A transformers cache with a length per row; subclasses say where the entries are.

    A forward of q tokens per row writes row b's entries at positions lengths[b] .. lengths[b] + q - 1 and returns the first
    max(lengths) + q entries of every row (`key_positions` says which, on a budget); the lengths change only in `advance` and `rollback`. Callers call `reserve` before
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
        self._width: int | None = None

    @property
    def lengths_tensor(self) -> Tensor:
        """int64 [B] on the device."""
        if self._tensor is None:
            self._tensor = on_device(self.lengths, torch.int64, self._device)
        return self._tensor

    def new_layer(self) -> RowLayer:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if key_states.shape[2] != self._width:
            raise RuntimeError(
                f"{type(self).__name__}: a forward of {key_states.shape[2]} tokens per row, but reserve() was called for "
                f"{self._width}; this cache is run by a ModelForward, a model of its own keeps transformers' cache"
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(self.new_layer())
        return self.layers[layer_idx].update(key_states, value_states)

    def reserve(self, counts: Sequence[int], width: int) -> None:
        """Makes room for a forward of `width` tokens per row, of which the first counts[b] are row b's own."""
        self._width = width

    def key_positions(self, width: int) -> Tensor:
        """Position of each entry that a forward of `width` tokens gets from `update`, int64 [n], or [B, n] where rows differ."""
        return torch.arange(self.max_length + width, device=self._device)

    def forward_of(self, counts: list[int], width: int, windows: list[int]) -> PagedForward | None:
        """The forward that was reserved, where the attention reads the cache's pages itself (`paged_attention`); windows: tokens
        that each layer reads, 0 for all."""
        return None

    def check(self) -> None:
        """Raises RuntimeError where the device has noticed something since the cache was made. Waits for it."""

    def advance(self, counts: Sequence[int]) -> None:
        """Takes the first counts[b] tokens of the last forward, of those that were reserved, into row b."""
        before = self._tensor
        self._set([n + c for n, c in zip(self.lengths, counts, strict=True)])
        if before is not None:
            self._tensor = before + on_device(counts, torch.int64, self._device)

    def compact(self, path: Tensor) -> None:
        """Moves the accepted nodes of each row's tree behind its root, which is the first token of the last forward, before it
        is advanced; path: int32 [B, K], as `verify_tree` returns it."""
        raise NotImplementedError

    def rollback(self, counts: Sequence[int]) -> None:
        """Drops row b's last counts[b] tokens.

        Raises ValueError where a count is negative or larger than the row's length.
        """
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if not 0 <= count <= length:
                name = type(self).__name__
                raise ValueError(f"{name}.rollback: counts[{row}] must be in [0, {length}], got {count}")
        self._set([n - c for n, c in zip(self.lengths, counts, strict=True)])

    def evict(self, ahead: int = 0) -> None:
        """Lets go of the entries that the budget has left behind, where the storage can. Rolling back by more than `ahead`
        tokens from where this was called last may then need them, which is an error."""

    def reorder_cache(self, *args) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: rows cannot be reordered or repeated; select_rows() keeps some of them"
        )

    batch_repeat_interleave = batch_select_indices = reorder_cache

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


def check_cache(owner: str, kind: str, page_size: int) -> str:
    """The kind, if it and the page size are such."""
    if kind not in CACHES:
        raise ValueError(f"{owner}: cache must be one of {', '.join(CACHES)}, got {kind!r}")
    if not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"{owner}: page_size must be an int >= 1, got {page_size!r}")
    return kind
