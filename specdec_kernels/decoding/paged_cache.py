"""A transformers cache with a length per row whose entries lie in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..paged_kv_cache import PagedKVCache
from ..status import CacheStatus
from .cache import RowCache, RowLayer
from .paged_attention import PagedForward, Wrappers
from .support import UnsupportedModel
from .transfers import on_device


class _PagedLayer(RowLayer):
    """Writes a layer's new entries to their pages and gathers those that the attention reads."""

    def __init__(self, owner: PagedCache, index: int):
        super().__init__(owner)
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pages = self.owner.pages
        if key_states.device != pages.block_table.device:
            raise UnsupportedModel(
                f"PagedCache: layer {self.index} is on {key_states.device}, the cache on {pages.block_table.device}; models "
                'spread over devices need cache="ragged"'
            )
        (heads, dim), (value_heads, value_dim) = (t.shape[1::2] for t in (key_states, value_states))
        pages.add_layer(heads, dim, dtype=key_states.dtype, value_heads=value_heads, value_dim=value_dim)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        owner.pages.write(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2), owner.slots)
        if not owner.gather:
            return owner.pages.layers[self.index]
        if owner.max_length == 0:
            return key_states, value_states  # all there is
        keys, values = owner.pages.read(self.index, owner.blocks)
        return keys.narrow(2, 0, owner.gathered), values.narrow(2, 0, owner.gathered)


class PagedCache(RowCache):
    """`RowCache` over a `PagedKVCache`: a row holds the pages that its tokens need and no more, rejected tokens give theirs back
    on the device. Attention reads a gathered copy of them, or the pages themselves.

    Args:
        capacity: tokens that a row is expected to need at most; pages beyond are made when they are needed.
        page_size: tokens of a page.
        gather: False where the attention reads the pages itself (`paged_attention`).
        The others as in `RowCache`.

    `pages` is the `PagedKVCache`; its lengths run ahead of `lengths` by what `reserve` made room for. It starts with a page for
    each row and grows by half, so that it holds what the texts have come to and not what they may.
    """

    def __init__(
        self, config, batch_size: int, *, capacity: int = 256, page_size: int = 16, gather: bool = True, **options
    ):
        super().__init__(config, batch_size, **options)
        if not gather and self.sinks:
            raise ValueError(f"PagedCache: sinks must be 0 for attention that reads pages, got {self.sinks}")
        capacity = max(int(capacity), 1)
        self.pages = PagedKVCache(
            max(batch_size, 1), page_size, num_requests=batch_size, max_tokens=capacity, device=self._device,
            window=self.budget, sinks=self.sinks,
            scrub=True,  # what one row left behind, NaN perhaps, is not for the next one to multiply by a mask's 0
        )  # fmt: skip
        self.gather = gather
        self._most = batch_size * -(-capacity // page_size)
        self._first = -(-self.sinks // page_size)  # blocks of the sinks
        self._reserved = [0] * batch_size
        self._evicted = [0] * batch_size  # blocks behind the sinks' that each row has let go
        self._worst: Tensor | None = None
        self._wrappers = Wrappers()
        self.slots: Any = None
        self.blocks: Any = None
        self.gathered = 0
        self._positions: Tensor | None = None

    def new_layer(self) -> RowLayer:
        return _PagedLayer(self, len(self.layers))

    def reserve(self, counts: Sequence[int], width: int) -> None:
        if len(counts) != len(self.lengths) or not all(0 <= n <= width for n in counts):
            raise ValueError(
                f"PagedCache.reserve: counts must be {len(self.lengths)} numbers in [0, {width}], got {list(counts)}"
            )
        super().reserve(counts, width)
        pages, size = self.pages, self.pages.page_size
        self._take_none()  # of a forward whose tokens nobody took
        after = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        # The host knows all lengths, so that the free list cannot run dry.
        needed, columns = sum(-(-n // size) for n in after) - sum(self._evicted), pages.block_table.shape[1]
        more = max(needed, min(pages.num_pages * 3 // 2, self._most)) if needed > pages.num_pages else 0
        longest = max(after, default=0)
        pages.grow(more, max(longest, columns * size * 3 // 2) if longest > columns * size else 0)
        placed = pages.append(on_device(counts, torch.int32, self._device), max_new=width)
        self._note(placed.status)
        self.slots, self._reserved = placed.slots, list(counts)
        if self.gather:
            self._choose(width)

    def _choose(self, width: int) -> None:
        """Blocks that the attention gathers, and the positions of their entries: all, or those of the sinks and the budget."""
        size, end = self.pages.page_size, self.max_length + width
        self.blocks, self.gathered, self._positions = None, end, None
        blocks = -(-end // size)
        if self.max_length == 0:
            return
        if self.budget is not None:
            starts = [max(max(n - self.budget + 1, 0) // size, self._first) for n in self.lengths]
            tail = max(-(-(n + width) // size) - s for n, s in zip(self.lengths, starts, strict=True))
            if self._first + tail < blocks:
                start = ((self.lengths_tensor - self.budget + 1).clamp_min(0) // size).clamp_min(self._first)
                offset = torch.arange(tail, device=self._device)
                sinks = torch.arange(self._first, device=self._device).expand(len(starts), -1)
                block = torch.cat([sinks, start[:, None] + offset], 1)
                self.blocks = self.pages.blocks_at(block)
                self._positions = (block[:, :, None] * size + torch.arange(size, device=self._device)).flatten(1)
                self.gathered = self._positions.shape[1]
                return
        self.blocks = self.pages.blocks(blocks)

    def key_positions(self, width: int) -> Tensor:
        return super().key_positions(width) if self._positions is None else self._positions

    def forward_of(self, counts: list[int], width: int, windows: list[int]) -> PagedForward | None:
        if self.gather:
            return None
        return PagedForward(
            counts,
            width,
            self.lengths,
            self.pages.block_table,
            self.pages.page_size,
            windows,
            self.budget,
            self._wrappers,
        )

    def _note(self, status: Tensor) -> None:
        if status.numel():
            worst = status.max()
            self._worst = worst if self._worst is None else torch.maximum(self._worst, worst)

    def check(self) -> None:
        if self._worst is not None and int(self._worst):
            raise RuntimeError(f"PagedCache: the pages' bookkeeping reported {CacheStatus(int(self._worst))!r}")

    def _take_none(self) -> None:
        reserved, self._reserved = self._reserved, [0] * len(self.lengths)
        self._give_back(reserved)

    def _give_back(self, counts: Sequence[int]) -> None:
        if any(counts):
            self._note(self.pages.rollback(on_device(counts, torch.int32, self._device)))

    def compact(self, path: Tensor) -> None:
        self.pages.compact(path, self.lengths_tensor)

    def advance(self, counts: Sequence[int]) -> None:
        for row, (count, reserved) in enumerate(zip(counts, self._reserved, strict=True)):
            if not 0 <= count <= reserved:
                raise ValueError(f"PagedCache.advance: counts[{row}] must be in [0, {reserved}], got {count}")
        self._give_back([r - c for r, c in zip(self._reserved, counts, strict=True)])
        self._reserved = [0] * len(self.lengths)
        super().advance(counts)

    def rollback(self, counts: Sequence[int]) -> None:
        self._check_window(counts)
        super().rollback(counts)
        size = self.pages.page_size
        past_sinks = [-(-n // size) - self._first for n in self.lengths]
        self._evicted = [max(min(e, m), 0) for e, m in zip(self._evicted, past_sinks, strict=True)]
        self._give_back([r + c for r, c in zip(self._reserved, counts, strict=True)])
        self._reserved = [0] * len(self.lengths)

    def _check_window(self, counts: Sequence[int]) -> None:
        """Raises where a rollback would need entries that are gone; the device would leave such a row as it is."""
        if self.budget is None:
            return
        size, first = self.pages.page_size, self._first
        for row, (length, count, evicted) in enumerate(zip(self.lengths, counts, self._evicted, strict=True)):
            new = length - count
            needed = max(max(new - self.budget + 1, 0) // size, first)
            if count > 0 and evicted and needed < min(first + evicted, -(-new // size)):
                raise RuntimeError(
                    f"PagedCache.rollback: row {row} back to {new} tokens needs entries from {needed * size} on, but those "
                    f"up to {(first + evicted) * size} have left its budget of {self.budget}"
                )

    def evict(self, ahead: int = 0) -> None:
        if self.budget is None:
            return
        self._take_none()
        self._note(self.pages.evict(self.budget + ahead))
        size = self.pages.page_size
        gone = [max((n - self.budget - ahead) // size - self._first, 0) for n in self.lengths]
        self._evicted = [max(a, b) for a, b in zip(self._evicted, gone, strict=True)]

    def fork(self, source: int, destination: int) -> None:
        """Row `destination` becomes a copy of `source` that shares its pages, until either writes to them."""
        self._take_none()
        self.pages.fork(source, destination)
        lengths = list(self.lengths)
        lengths[destination] = lengths[source]
        self._evicted[destination] = self._evicted[source]
        self._set(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.pages.select(rows)
        super().select_rows(rows)
        self._reserved = [self._reserved[r] for r in rows]
        self._evicted = [self._evicted[r] for r in rows]
