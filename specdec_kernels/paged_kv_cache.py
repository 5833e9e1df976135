"""`PagedKVCache`: pages, free list, lengths and shared prefixes of a batch's keys and values, on the package's own ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from .eager._moves import bits
from .kv_append_slots import kv_append_slots
from .kv_compact import kv_compact
from .kv_copy_pages import kv_copy_pages
from .kv_evict import kv_evict
from .kv_rollback import kv_rollback

_NAME = "PagedKVCache"


class LayerPages(NamedTuple):
    """One layer's `keys` [P, page_size, Hk, Dk] and `values` [P, page_size, Hv, Dv]."""

    keys: Tensor
    values: Tensor


class Appended(NamedTuple):
    """`slots` int64 [R, max_new]: where each new token goes, for `write`; -1 where there is none · `starts` int32 [R]: lengths
    before it, the positions of the first new tokens · `status` int32 [R]: bits of `CacheStatus`; a request with any got nothing
    and its outputs of this step mean nothing."""

    slots: Tensor
    starts: Tensor
    status: Tensor


class PagedKVCache:
    """Keys and values of R requests in pages that they share among them, each request with its own length.

    Token t of request r is at offset t % page_size of page `block_table[r, t // page_size]`, in every layer. All state is on the
    device, and no method waits for it but `check` and, on a GPU, those that are given Python lists; what went wrong (no pages
    left, a broken table) comes back as `CacheStatus` bits for the caller to read when it likes. Requests are rows 0..R-1; a row
    of length 0 holds nothing.

    A step: `append` makes room for the tokens of the forward, `write` and `read` go layer by layer, `rollback` takes back what
    verification rejected (after a tree, `compact` first). With a window, `evict` follows. `fork` lets a request share another's
    pages, which are copied when either writes to them. `grow` and `select` replace the tensors: a CUDA graph that holds the old
    ones goes on with those.

    Args:
        num_pages: P, pages in all, 1..2^31 - 1.
        page_size: tokens of a page.
        num_requests: R.
        max_tokens: most tokens of a request; `block_table` gets M = ceil(max_tokens / page_size) columns.
        device: of all tensors.
        window: positions that attention reads, the token's own included, where it does not read all: `evict` may then free the
            older pages.
        sinks: first tokens of a request that stay all the same; 0 without a window.
        scrub: zero what is freed or rejected, so that no later request finds another's values. Requests that share a page by
            `fork` can both read all of it.
        backend: of the ops, as in `kv_rollback`.

    Attributes:
        caches: keys and values of all layers, as `kv_compact` takes them.
        layers: list of `LayerPages`, the storage less the two pages that are nobody's: what paged attention kernels take.
        shared: True once a page may have several holders, so that `append` looks for pages to copy; `fork` sets it. Set it
            where you raise `ref_counts` yourself.
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
        _whole("sinks", sinks, 0)
        if window is None and sinks:
            _checks.fail(_NAME, "sinks", "0 without a window", sinks)
        self.window, self.sinks, self.scrub = window, sinks, scrub
        self.num_pages, self.page_size, self.num_requests = num_pages, page_size, num_requests
        self.device, self.backend = torch.device(device), backend
        self.shared = False
        self._refused: Tensor | None = None
        self.layers: list[LayerPages] = []
        self.caches: list[Tensor] = []
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
        # Two pages more than there are: one takes what has no slot, one stays zero and is read where there is no page. Zeros,
        # as a masked entry still meets the softmax as 0 * value, and 0 * NaN is NaN.
        shape = (self.num_pages + 2, self.page_size)
        parts = (torch.zeros(*shape, *size, dtype=dtype, device=self.device) for size in sizes)
        self._storage.append(LayerPages(*parts))
        self._expose()

    def _expose(self) -> None:
        self.layers = [LayerPages(k[: self.num_pages], v[: self.num_pages]) for k, v in self._storage]
        self.caches = [t for layer in self.layers for t in layer]

    def _state(self) -> tuple:
        return self.block_table, self.free_pages, self.num_free, self.page_size

    def append(self, num_new: Sequence[int] | Tensor, max_new: int) -> Appended:
        """Room for num_new[r] more tokens of each request, at most max_new (`kv_append_slots`); pages that others hold too and
        that will be written are copied."""
        starts = self.seq_lens.clone()
        num_new = self._counts("num_new", num_new, max_new)
        placed = kv_append_slots(
            self.seq_lens, num_new, *self._state(), ref_counts=self.ref_counts, max_new=max_new, backend=self.backend
        )
        if self.shared:
            kv_copy_pages(self.caches, placed.copy_src, placed.copy_dst, backend=self.backend)
        self._refused = placed.status
        return Appended(placed.slots, starts, placed.status)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Puts keys [.., Hk, Dk] and values [.., Hv, Dv] of new tokens at their `slots` (of `append`, as many elements); tokens
        whose slot is -1 go nowhere."""
        flat = slots.flatten()
        storage, new = self._layer("write", layer), LayerPages(keys, values)
        for name, into, t in zip(LayerPages._fields, storage, new, strict=True):
            size = into.shape[2:]
            if t.shape[-2:] != size or t.numel() != flat.numel() * size.numel() or t.dtype != into.dtype:
                must = f"{_short(into.dtype)} [{flat.numel()} tokens, {size[0]}, {size[1]}]"
                _checks.fail(f"{_NAME}.write", name, must, t)
        flat = torch.where(flat < 0, self.num_pages * self.page_size, flat)
        for into, t in zip(storage, new, strict=True):
            rows = t.reshape(-1, *into.shape[2:])
            bits(into).view(-1, *into.shape[2:]).index_copy_(0, flat, bits(rows.detach()))

    def blocks(self, count: int) -> Tensor:
        """Pages of the first `count` blocks of every request, int64 [R, count], for `read`; where there is none, a page of
        zeros that belongs to nobody."""
        table = self.block_table[:, :count].long()
        table = torch.nn.functional.pad(table, (0, count - table.shape[1]), value=-1)
        return torch.where(table < 0, self.num_pages + 1, table)

    def blocks_at(self, index: Tensor) -> Tensor:
        """The same of the blocks at `index`, int64 [R, n]."""
        columns = self.block_table.shape[1]
        table = self.block_table.long().gather(1, index.clamp_max(columns - 1))
        return torch.where((table < 0) | (index >= columns), self.num_pages + 1, table)

    def read(self, layer: int, blocks: Tensor | int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, gathered: [R, H, blocks * page_size, D], token t at index t; blocks: how many, or what
        `blocks` gives for all layers of a forward. What lies behind a request's length means nothing; with `scrub` it is zero or
        was the request's own or one's that shares the page, so that no NaN of another request meets a mask's 0."""
        storage = self._layer("read", layer)
        if not isinstance(blocks, Tensor):
            blocks = self.blocks(blocks)
        rows, count = blocks.shape
        keys, values = (
            bits(t).index_select(0, blocks.flatten()).view(t.dtype).view(rows, count * self.page_size, *t.shape[2:])
            for t in storage
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def rollback(self, num_rejected: Sequence[int] | Tensor) -> Tensor:
        """Takes the last num_rejected[r] tokens off each request; returns `kv_rollback`'s status. A request that the last `append`
        refused took no tokens, so that the next rollback takes none off it. One whose window would need pages that were evicted
        is left as it is, with status EVICTED."""
        num_rejected = self._counts("num_rejected", num_rejected)
        if self._refused is not None:
            num_rejected = num_rejected.masked_fill(self._refused != 0, 0)
        return self._rollback(num_rejected)

    def _rollback(self, num_rejected: Tensor) -> Tensor:
        self._refused = None
        return kv_rollback(
            self.seq_lens, num_rejected, *self._state(), ref_counts=self.ref_counts, window=self.window,
            sinks=self.sinks, scrub=self.caches if self.scrub else None, backend=self.backend,
        )  # fmt: skip

    def evict(self, keep_last: int) -> Tensor:
        """Frees the pages that hold neither the last `keep_last` tokens of a request nor its first `sinks`; returns `kv_evict`'s
        status. keep_last: at least `window`; with d drafts more, a step that is wholly rejected misses nothing."""
        if self.window is None:
            _checks.fail(f"{_NAME}.evict", "window", "given to the cache, whose attention reads all tokens", "None")
        _whole("keep_last", keep_last, self.window)
        return kv_evict(
            self.seq_lens, keep_last, *self._state(), sinks=self.sinks, ref_counts=self.ref_counts,
            scrub=self.caches if self.scrub else None, backend=self.backend,
        )  # fmt: skip

    def compact(self, path: Tensor, starts: Tensor) -> None:
        """Moves the accepted nodes of each request's tree behind its root (`kv_compact`); starts: of the step's `append`. A
        `rollback` of the nodes that were not accepted follows."""
        kv_compact(
            self.caches, path, starts, block_table=self.block_table, page_size=self.page_size, backend=self.backend
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
            self.shared = True
        if num_tokens is None:
            return torch.zeros_like(self.seq_lens)
        left_out = torch.zeros_like(self.seq_lens)
        left_out[destination] = self.seq_lens[destination] - num_tokens
        return self._rollback(left_out)

    def free(self, requests: Sequence[int]) -> Tensor:
        """Frees all tokens of these requests; returns `rollback`'s status."""
        self._check_rows("free", requests)
        chosen = set(requests)
        return self._rollback(self.seq_lens * self._ints([row in chosen for row in range(self.num_requests)]))

    def select(self, requests: Sequence[int]) -> None:
        """Keeps these requests, in that order, as requests 0, 1, ..; the others are freed."""
        self._check_rows("select", requests)
        kept = set(requests)
        if len(kept) < len(requests):
            _checks.fail(f"{_NAME}.select", "requests", "different from each other", f"{list(requests)}")
        self.free([row for row in range(self.num_requests) if row not in kept])
        rows = torch.tensor(list(requests), dtype=torch.int64, device=self.device)
        self.seq_lens, self.block_table, self._refused = self.seq_lens[rows], self.block_table[rows], None
        self.num_requests = len(requests)

    def grow(self, num_pages: int, max_tokens: int) -> None:
        """At least so many pages and columns for so many tokens, in new storage; tokens keep their places."""
        _whole("num_pages", num_pages, 0)
        _whole("max_tokens", max_tokens, 0)
        table, storage = self.block_table, []
        columns = -(-max_tokens // self.page_size) - table.shape[1]
        if columns > 0:
            table = torch.nn.functional.pad(table, (0, columns), value=-1)
        more = max(num_pages - self.num_pages, 0)
        if not more:
            self.block_table = table
            return
        # All is made before anything is replaced: memory may run out.
        for layer in self._storage:
            grown = [t.new_zeros(num_pages + 2, *t.shape[1:]) for t in layer]
            for t, old in zip(grown, layer, strict=True):
                bits(t)[: self.num_pages] = bits(old)[: self.num_pages]
            storage.append(LayerPages(*grown))
        new = torch.arange(self.num_pages + more - 1, self.num_pages - 1, -1, dtype=torch.int32, device=self.device)
        free_pages = torch.cat([new, self.free_pages])  # below the old ones, so that these go first
        num_free, ref_counts = self.num_free + more, torch.nn.functional.pad(self.ref_counts, (0, more))
        self.block_table, self.num_pages = table, num_pages
        self.free_pages, self.num_free, self.ref_counts, self._storage = free_pages, num_free, ref_counts, storage
        self._expose()

    def check(self) -> None:
        """Raises RuntimeError where the bookkeeping contradicts itself: a page that is neither free nor held, freed twice,
        counted wrongly, or missing under a token. Waits for the device."""
        lengths, table = self.seq_lens.tolist(), self.block_table.tolist()
        free = self.free_pages[: int(self.num_free)].tolist()
        held = Counter(page for row in table for page in row if page != -1)
        pages = set(range(self.num_pages))
        problems = [f"{page} is no page" for page in (set(free) | set(held)) - pages]
        problems += [f"page {page} is on the free list {n} times" for page, n in Counter(free).items() if n > 1]
        problems += [f"page {page} is free and held" for page in set(free) & set(held)]
        problems += [f"page {page} leaked" for page in pages - set(free) - set(held)]
        problems += [
            f"page {page} has {held[page]} holders and counts {count}"
            for page, count in enumerate(self.ref_counts.tolist())
            if count != held[page]
        ]
        for r, (length, row) in enumerate(zip(lengths, table, strict=True)):
            blocks = -(-length // self.page_size)
            if any(page != -1 for page in row[blocks:]):
                problems.append(f"request {r} of {length} tokens holds pages behind them: {row}")
            present = [page >= 0 for page in row[:blocks]]
            kept = -(-self.sinks // self.page_size)
            old = 0 if self.window is None else max(length - self.window + 1, 0) // self.page_size
            # What a window has left goes from its first block on, without a gap.
            evictable = present[kept : max(old, kept)]
            if not all(present[:kept] + present[max(old, kept) :]) or evictable != sorted(evictable):
                problems.append(f"request {r} of {length} tokens lacks a page: {row}")
        if problems:
            raise RuntimeError(f"{_NAME}.check: {'; '.join(problems[:8])}")

    def _counts(self, name: str, value: Sequence[int] | Tensor, most: int = 2**31 - 1) -> Tensor:
        """On the device as it is; a list of Python's is checked first."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, Sequence) or len(value) != self.num_requests:
            _checks.fail(_NAME, name, f"a number for each of {self.num_requests} requests", value)
        for r, count in enumerate(value):
            _whole(f"{name}[{r}]", count, 0, most)
        return self._ints(value)

    def _layer(self, method: str, layer: int) -> LayerPages:
        if not isinstance(layer, int) or not 0 <= layer < len(self._storage):
            _checks.fail(f"{_NAME}.{method}", "layer", f"one of the {len(self._storage)} that add_layer made", layer)
        return self._storage[layer]

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _check_rows(self, method: str, requests: Sequence[int]) -> None:
        if not isinstance(requests, Sequence):
            _checks.fail(f"{_NAME}.{method}", "requests", "a list or tuple", requests)
        for row in requests:
            if not isinstance(row, int) or not 0 <= row < self.num_requests:
                _checks.fail(f"{_NAME}.{method}", "requests", f"of 0..{self.num_requests - 1}", row)


def _whole(name: str, value, low: int, high: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _checks.fail(_NAME, name, f"an int in {low}..{high}", value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
