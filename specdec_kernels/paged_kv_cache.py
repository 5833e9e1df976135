"""`PagedKVCache`: pages, free list, lengths and shared prefixes of a batch's keys and values, on the package's own ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from .kv_append_slots import AppendOutput, kv_append_slots
from .kv_compact import kv_compact
from .kv_copy_pages import kv_copy_pages
from .kv_evict import kv_evict
from .kv_rollback import kv_rollback

_NAME = "PagedKVCache"


class LayerPages(NamedTuple):
    """One layer's `keys` [P, page_size, Hk, Dk] and `values` [P, page_size, Hv, Dv]."""

    keys: Tensor
    values: Tensor


class PagedKVCache:
    """Keys and values of R requests in pages that they share among them, each request with its own length.

    Token t of request r is at offset t % page_size of page `block_table[r, t // page_size]`, in every layer. All state is on the
    device and no method waits for it but `check`; what went wrong (no pages left, a broken table) comes back as `CacheStatus`
    bits for the caller to read when it likes. Requests are rows 0..R-1; a row of length 0 holds nothing.

    A step: `append` makes room for the tokens of the forward, `write` and `read` go layer by layer, `rollback` takes back what
    verification rejected (after a tree, `compact` first). `fork` lets a request share another's pages, which are copied when
    either writes to them.

    Args:
        num_pages: P, pages in all, 1..2^31 - 1.
        page_size: tokens of a page.
        num_requests: R.
        max_tokens: most tokens of a request; `block_table` gets M = ceil(max_tokens / page_size) columns.
        device: of all tensors.
        window: positions that attention reads, the token's own included, where it does not read all: `evict` may then free the
            older pages.
        sinks: first tokens of a request that stay all the same; 0 without a window.
        scrub: zero what is freed or rejected, so that no request finds another's values.
        backend: of the ops, as in `kv_rollback`.

    Attributes:
        layers: list of `LayerPages`, the storage without its padding page: what paged attention kernels take.
        seq_lens, block_table, free_pages, num_free, ref_counts: int32 tensors as `kv_rollback` describes them.

    Raises:
        ValueError: an argument out of range or of the wrong shape; nothing is changed then.

    >>> cache = PagedKVCache(8, 4, num_requests=2, max_tokens=16)
    >>> cache.add_layer(num_heads=1, head_dim=2)
    >>> placed = cache.append([6, 3], max_new=6)
    >>> cache.write(0, torch.ones(12, 1, 2), torch.ones(12, 1, 2), placed.slots)
    >>> cache.rollback([3, 0]).tolist(), cache.seq_lens.tolist(), cache.block_table.tolist()
    ([0, 0], [3, 3], [[0, -1, -1, -1], [2, -1, -1, -1]])
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_requests: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        window: int | None = None,
        sinks: int = 0,
        scrub: bool = False,
        backend: str = "auto",
    ):
        _whole("num_pages", num_pages, 1)
        _whole("page_size", page_size, 1)
        _whole("num_requests", num_requests, 0)
        _whole("max_tokens", max_tokens, 1)
        if window is not None:
            _whole("window", window, 1)
        _whole("sinks", sinks, 0, 0 if window is None else 2**31 - 1)
        self.window, self.sinks, self.scrub = window, sinks, scrub
        self.num_pages, self.page_size, self.num_requests = num_pages, page_size, num_requests
        self.device, self.backend = torch.device(device), backend
        self.layers: list[LayerPages] = []
        self._storage: list[LayerPages] = []
        zeros = {"dtype": torch.int32, "device": self.device}
        self.seq_lens = torch.zeros(num_requests, **zeros)
        self.block_table = torch.full((num_requests, -(-max_tokens // page_size)), -1, **zeros)
        self.free_pages = torch.arange(num_pages - 1, -1, -1, **zeros)  # page 0 is taken first
        self.num_free = torch.full((1,), num_pages, **zeros)
        self.ref_counts = torch.zeros(num_pages, **zeros)

    def add_layer(
        self, num_heads: int, head_dim: int, *, dtype: torch.dtype = torch.float32, value_heads: int | None = None,
        value_dim: int | None = None,
    ) -> None:  # fmt: skip
        """Storage for one more layer: keys of num_heads * head_dim elements a token, values alike unless said otherwise."""
        sizes = (num_heads, head_dim), (value_heads or num_heads, value_dim or head_dim)
        for size in (*sizes[0], *sizes[1]):
            _whole("num_heads and head_dim", size, 1)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize not in (1, 2, 4):
            _checks.fail(f"{_NAME}.add_layer", "dtype", "of 1, 2 or 4 bytes an element", dtype)
        # One page more than there are: what has no slot is written there. Zeros, as a masked entry still meets the softmax
        # as 0 * value, and 0 * NaN is NaN.
        shape = (self.num_pages + 1, self.page_size)
        parts = (torch.zeros(*shape, *size, dtype=dtype, device=self.device) for size in sizes)
        self._storage.append(LayerPages(*parts))
        self._expose()

    def _expose(self) -> None:
        self.layers = [LayerPages(k[: self.num_pages], v[: self.num_pages]) for k, v in self._storage]

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of all layers, as `kv_compact` takes them."""
        return [t for layer in self.layers for t in layer]

    def _state(self) -> tuple:
        return self.block_table, self.free_pages, self.num_free, self.page_size

    def append(self, num_new: Sequence[int] | Tensor, max_new: int) -> AppendOutput:
        """Room for num_new[r] more tokens of each request, at most max_new (`kv_append_slots`); pages that others hold too and
        that will be written are copied. A request with a status got nothing and keeps its length."""
        placed = kv_append_slots(
            self.seq_lens, self._counts("num_new", num_new), *self._state(), ref_counts=self.ref_counts, max_new=max_new,
            backend=self.backend,
        )  # fmt: skip
        kv_copy_pages(self.caches, placed.copy_src, placed.copy_dst, backend=self.backend)
        return placed

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Puts keys [.., Hk, Dk] and values [.., Hv, Dv] of new tokens at their `slots` (of `append`, as many elements); tokens
        whose slot is -1 go nowhere."""
        flat = slots.flatten()
        flat = torch.where(flat < 0, self.num_pages * self.page_size, flat)
        for name, storage, new in zip(LayerPages._fields, self._storage[layer], (keys, values), strict=True):
            size = storage.shape[2:]
            if new.shape[-2:] != size or new.numel() != flat.numel() * size.numel() or new.dtype != storage.dtype:
                must = f"{_short(storage.dtype)} [{flat.numel()} tokens, {size[0]}, {size[1]}]"
                _checks.fail(f"{_NAME}.write", name, must, new)
            storage.view(-1, *size).index_copy_(0, flat, new.reshape(-1, *size))

    def blocks(self, count: int) -> Tensor:
        """Pages of the first `count` blocks of every request, int64 [R, count], for `read`; where there is none, a page of
        finite values that belongs to nobody."""
        table = self.block_table[:, :count].long()
        return torch.where(table < 0, self.num_pages, table)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, gathered: [R, H, blocks * page_size, D], token t at index t. What lies behind a request's
        length is finite and means nothing."""
        rows, count = blocks.shape
        gathered = (
            t.index_select(0, blocks.flatten()).view(rows, count * self.page_size, *t.shape[2:]).transpose(1, 2)
            for t in self._storage[layer]
        )
        keys, values = gathered
        return keys, values

    def rollback(self, num_rejected: Sequence[int] | Tensor) -> Tensor:
        """Takes the last num_rejected[r] tokens off each request; returns `kv_rollback`'s status. A request whose window would
        need pages that were evicted is left as it is, with status EVICTED."""
        return kv_rollback(
            self.seq_lens, self._counts("num_rejected", num_rejected), *self._state(), ref_counts=self.ref_counts,
            window=self.window, sinks=self.sinks, scrub=self.caches if self.scrub else None, backend=self.backend,
        )  # fmt: skip

    def evict(self, keep_last: int) -> Tensor:
        """Frees the pages that hold neither the last `keep_last` tokens of a request nor its first `sinks`; returns `kv_evict`'s
        status. The window plus the drafts of a step is what no rollback of a step has to miss."""
        return kv_evict(
            self.seq_lens, keep_last, *self._state(), sinks=self.sinks, ref_counts=self.ref_counts,
            scrub=self.caches if self.scrub else None, backend=self.backend,
        )  # fmt: skip

    def compact(self, path: Tensor, seq_lens: Tensor) -> None:
        """Moves the accepted nodes of each request's tree behind its root (`kv_compact`); seq_lens [R]: lengths before the
        step's tokens were appended. A `rollback` of the nodes that were not accepted follows."""
        kv_compact(
            self.caches, path, seq_lens, block_table=self.block_table, page_size=self.page_size, backend=self.backend
        )

    def fork(self, source: int, destination: int, num_tokens: int | None = None) -> Tensor:
        """Makes request `destination` a copy of `source`, or of its first `num_tokens` tokens, that shares its pages. What
        `destination` held is freed. Returns `rollback`'s status for the tokens left out."""
        for name, row in (("source", source), ("destination", destination)):
            _whole(name, row, 0, self.num_requests - 1)
        if num_tokens is not None:
            _whole("num_tokens", num_tokens, 0)
        if source != destination:
            self.free([destination])
            held = self.block_table[source]
            self.ref_counts.index_add_(0, held.clamp_min(0), (held >= 0).to(torch.int32))
            self.block_table[destination] = held
            self.seq_lens[destination] = self.seq_lens[source]
        dropped = torch.zeros_like(self.seq_lens)
        if num_tokens is not None:
            dropped[destination] = self.seq_lens[destination] - num_tokens
        return self.rollback(dropped)

    def free(self, requests: Sequence[int]) -> None:
        """Frees all tokens of these requests."""
        dropped = torch.zeros_like(self.seq_lens)
        for row in requests:
            _whole("requests", row, 0, self.num_requests - 1)
            dropped[row] = self.seq_lens[row]
        self.rollback(dropped)

    def select(self, requests: Sequence[int]) -> None:
        """Keeps these requests, in that order, as requests 0, 1, ..; the others are freed."""
        if len(set(requests)) < len(requests):
            _checks.fail(f"{_NAME}.select", "requests", "different from each other", f"{list(requests)}")
        self.free([row for row in range(self.num_requests) if row not in set(requests)])
        rows = torch.tensor(list(requests), dtype=torch.int64, device=self.device)
        self.seq_lens, self.block_table = self.seq_lens[rows], self.block_table[rows]
        self.num_requests = len(requests)

    def grow(self, num_pages: int, max_tokens: int) -> None:
        """At least so many pages and columns for so many tokens, in new storage; tokens keep their places."""
        columns = -(-max_tokens // self.page_size) - self.block_table.shape[1]
        if columns > 0:
            self.block_table = torch.nn.functional.pad(self.block_table, (0, columns), value=-1)
        more = num_pages - self.num_pages
        if more <= 0:
            return
        new = torch.arange(num_pages - 1, self.num_pages - 1, -1, dtype=torch.int32, device=self.device)
        self.free_pages = torch.cat([new, self.free_pages])  # below the old ones, so that these go first
        self.num_free = self.num_free + more
        self.ref_counts = torch.nn.functional.pad(self.ref_counts, (0, more))
        for i, layer in enumerate(self._storage):
            grown = [t.new_zeros(num_pages + 1, *t.shape[1:]) for t in layer]
            for t, old in zip(grown, layer, strict=True):
                t[: self.num_pages] = old[: self.num_pages]
            self._storage[i] = LayerPages(*grown)
        self.num_pages = num_pages
        self._expose()

    def check(self) -> None:
        """Raises RuntimeError where the bookkeeping contradicts itself: a page that is neither free nor held, freed twice,
        counted wrongly, or missing under a token. Waits for the device."""
        lengths, table = self.seq_lens.tolist(), self.block_table.tolist()
        free = self.free_pages[: int(self.num_free)].tolist()
        held = Counter(page for row in table for page in row if page >= 0)
        problems = [f"page {page} is on the free list {n} times" for page, n in Counter(free).items() if n > 1]
        problems += [f"page {page} is free and held" for page in set(free) & set(held)]
        problems += [f"page {page} leaked" for page in set(range(self.num_pages)) - set(free) - set(held)]
        problems += [
            f"page {page} has {held[page]} holders and counts {count}"
            for page, count in enumerate(self.ref_counts.tolist())
            if count != held[page]
        ]
        for r, (length, row) in enumerate(zip(lengths, table, strict=True)):
            present = [page >= 0 for page in row[: -(-length // self.page_size)]]
            kept = -(-self.sinks // self.page_size)
            old = 0 if self.window is None else max(length - self.window + 1, 0) // self.page_size
            # What a window has left goes from its first block on, without a gap.
            evictable = present[kept : max(old, kept)]
            if not all(present[:kept] + present[max(old, kept) :]) or evictable != sorted(evictable):
                problems.append(f"request {r} of {length} tokens lacks a page: {row}")
        if problems:
            raise RuntimeError(f"{_NAME}.check: {'; '.join(problems[:8])}")

    def _counts(self, name: str, value: Sequence[int] | Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            value = torch.tensor(list(value), dtype=torch.int32, device=self.device)
        return value


def _whole(name: str, value, low: int, high: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _checks.fail(_NAME, name, f"an int in {low}..{high}", value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
