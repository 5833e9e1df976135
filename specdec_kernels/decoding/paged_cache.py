"""A transformers cache with a length per row whose entries lie in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..paged_kv_cache import PagedKVCache
from .cache import RowCache
from .paged_attention import PagedForward


class _PagedLayer(CacheLayerMixin):
    """Writes a layer's new entries to their pages and gathers those that the attention reads."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: PagedCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        (heads, dim), (value_heads, value_dim) = (t.shape[1::2] for t in (key_states, value_states))
        self.owner.pages.add_layer(heads, dim, dtype=key_states.dtype, value_heads=value_heads, value_dim=value_dim)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        owner.pages.write(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2), owner.slots)
        if not owner.gathers:
            return owner.pages.layers[self.index]
        if owner.max_length == 0:
            return key_states, value_states  # all there is
        keys, values = owner.pages.read(self.index, owner.blocks)
        end = owner.max_length + key_states.shape[2]
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.max_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.max_length

    def get_max_length(self) -> int:
        return -1


class PagedCache(RowCache):
    """`RowCache` over a `PagedKVCache`: a row holds the pages that its tokens need and no more, rejected tokens give theirs back
    on the device. Attention reads a gathered copy of them, or the pages themselves.

    Args:
        capacity: tokens per row to allocate at first; grows as needed.
        page_size: tokens of a page.
        gathers: False where the attention reads the pages itself (`paged_attention`).
        The others as in `RowCache`.

    `pages` is the `PagedKVCache`; its lengths run ahead of `lengths` by what `reserve` made room for.
    """

    def __init__(
        self, config, batch_size: int, *, capacity: int = 256, page_size: int = 16, gathers: bool = True, **options
    ):
        super().__init__(config, batch_size, **options)
        capacity = max(int(capacity), 1)
        self.pages = PagedKVCache(
            max(batch_size, 1) * -(-capacity // page_size), page_size, num_requests=batch_size, max_tokens=capacity,
            device=self._device, window=self.budget, sinks=self.sinks,
        )  # fmt: skip
        self._reserved = [0] * batch_size
        self._evicted = [0] * batch_size  # blocks behind the sinks' that each row has let go
        self.gathers = gathers
        self.slots: Any = None
        self.blocks: Any = None

    def new_layer(self) -> CacheLayerMixin:
        return _PagedLayer(self, len(self.layers))

    def reserve(self, counts: Sequence[int], width: int) -> None:
        pages, size = self.pages, self.pages.page_size
        self._give_back(self._reserved)  # of a forward whose tokens nobody took
        after = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        needed = sum(-(-n // size) for n in after) - sum(self._evicted)
        # The host knows all lengths, so that the free list cannot run dry unseen.
        if needed > pages.num_pages or max(after) > pages.block_table.shape[1] * size:
            pages.grow(
                max(needed, pages.num_pages * 3 // 2), max(max(after), pages.block_table.shape[1] * size * 3 // 2)
            )
        self.slots = pages.append(list(counts), max_new=width).slots
        self.blocks = pages.blocks(-(-(self.max_length + width) // size))
        self._reserved = list(counts)

    def forward_of(self, counts: list[int], width: int) -> PagedForward:
        """The forward that was reserved, for attention that reads the pages itself."""
        if self.budget is not None and self.sinks:
            raise ValueError(f"paged attention reads a window without sinks: sinks must be 0, got {self.sinks}")
        # Blocks that were evicted lie outside of the window; a kernel may touch them all the same.
        table = self.pages.block_table.clamp_min(0)
        return PagedForward(counts, width, self.lengths, table, self.pages.page_size, self.budget)

    def _give_back(self, counts: Sequence[int]) -> None:
        if any(counts):
            self.pages.rollback(list(counts))

    def advance(self, counts: Sequence[int], counts_tensor: Tensor | None = None) -> None:
        for row, (count, reserved) in enumerate(zip(counts, self._reserved, strict=True)):
            if not 0 <= count <= reserved:
                raise ValueError(f"PagedCache.advance: counts[{row}] must be in [0, {reserved}], got {count}")
        self._give_back([r - c for r, c in zip(self._reserved, counts, strict=True)])
        self._reserved = [0] * len(self.lengths)
        super().advance(counts, counts_tensor)

    def rollback(self, counts: Sequence[int]) -> None:
        self._check_window(counts)
        super().rollback(counts)
        size = self.pages.page_size
        past_sinks = [-(-n // size) - -(-self.sinks // size) for n in self.lengths]
        self._evicted = [max(min(e, m), 0) for e, m in zip(self._evicted, past_sinks, strict=True)]
        self._give_back([r + c for r, c in zip(self._reserved, counts, strict=True)])
        self._reserved = [0] * len(self.lengths)

    def _check_window(self, counts: Sequence[int]) -> None:
        """Raises where a rollback would need entries that are gone; the device would leave such a row as it is."""
        if self.budget is None:
            return
        size = self.pages.page_size
        first = -(-self.sinks // size)
        for row, (length, count, evicted) in enumerate(zip(self.lengths, counts, self._evicted, strict=True)):
            new = length - count
            needed = max(max(new - self.budget + 1, 0) // size, first)
            if count > 0 and evicted and needed < min(first + evicted, -(-new // size)):
                raise RuntimeError(
                    f"PagedCache.rollback: row {row} back to {new} tokens needs entries from {needed * size} on, but those "
                    f"up to {(first + evicted) * size} have left its budget of {self.budget}"
                )

    def evict(self) -> None:
        if self.budget is None:
            return
        self._give_back(self._reserved)
        self._reserved = [0] * len(self.lengths)
        self.pages.evict(self.budget)
        size = self.pages.page_size
        first = -(-self.sinks // size)
        gone = [max((n - self.budget) // size - first, 0) for n in self.lengths]
        self._evicted = [max(a, b) for a, b in zip(self._evicted, gone, strict=True)]

    def fork(self, source: int, destination: int) -> None:
        """Row `destination` becomes a copy of `source` that shares its pages, until either writes to them."""
        self._give_back(self._reserved)
        self._reserved = [0] * len(self.lengths)
        self.pages.fork(source, destination)
        lengths = list(self.lengths)
        lengths[destination] = lengths[source]
        self._evicted[destination] = self._evicted[source]
        self._set(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        self.pages.select(rows)
        self._reserved = [self._reserved[r] for r in rows]
        self._evicted = [self._evicted[r] for r in rows]
