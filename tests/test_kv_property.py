"""A paged cache in use: random sequences of appends, rollbacks, evictions, forks and frees against a model in plain Python.

The model knows each request's tokens and pages; the cache is a dict of what was written where, so a page that two requests write
to, or that comes back while somebody reads it, shows as a wrong token.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from specdec_kernels import CacheStatus
from tests.kv_states import State, ints

B, MAX_NEW = 4, 7
ROWS, OTHERS = [4, 1, 5, 0], [2, 3]
"""Of tables of six, those of the requests, where they have slots; the batch then begins with one that is skipped."""
EXAMPLES = {"native": 1000, "eager": 6, "triton": 5}
LENGTH = 100
"""Operations of an example: 100,000 on the native backend."""
EVERYTHING = {
    "page_size": 2, "pages": 24, "columns": 12, "counts": True, "window": 3, "sinks": 1, "null_page": 0, "slots": True,
    "operations": [random.Random(n).randrange(2**20) for n in range(LENGTH)],
}  # fmt: skip
"""A case in which all there is happens, also where few are run."""


@dataclass
class Request:
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    """-1 where evicted."""


class Model:
    """Who holds which page, by reference counting done by hand."""

    def __init__(self, pages: range, page_size: int, columns: int, window: int | None, sinks: int):
        self.page_size, self.columns, self.window, self.sinks = page_size, columns, window, sinks
        self.requests = [Request() for _ in range(B)]
        self.free = list(pages)
        self.pages = pages
        self.seen: Counter[str] = Counter()

    def holders(self, page: int) -> int:
        return sum(request.pages.count(page) for request in self.requests)

    def append(self, b: int, tokens: list[int]) -> tuple[int, tuple[int, int]]:
        """Returns (status, pages to copy from and to)."""
        request, size = self.requests[b], self.page_size
        length = len(request.tokens)
        needed = -(-(length + len(tokens)) // size)
        if needed > self.columns:
            self.seen["table full"] += 1
            return CacheStatus.TABLE_FULL, (-1, -1)
        copies = bool(tokens) and length % size > 0 and self.holders(request.pages[-1]) > 1
        if needed - len(request.pages) + copies > len(self.free):
            self.seen["out of pages"] += 1
            return CacheStatus.OUT_OF_PAGES, (-1, -1)
        copy = (-1, -1)
        self.seen["copies"] += copies
        if copies:
            copy = (request.pages[-1], self.free.pop())
            request.pages[-1] = copy[1]
        while len(request.pages) < needed:
            request.pages.append(self.free.pop())
        request.tokens += tokens
        return 0, copy

    def rollback(self, b: int, rejected: int) -> int:
        """Returns the status."""
        request, size = self.requests[b], self.page_size
        length = max(len(request.tokens) - rejected, 0)
        if self.window is not None and length < len(request.tokens):
            needed = {*range(max(length - self.window + 1, 0), length), *range(min(self.sinks, length))}
            needed |= {length - 1} if length % size else set()  # its block is written to
            if any(request.pages[t // size] < 0 for t in needed):
                self.seen["refused"] += 1
                return CacheStatus.EVICTED
        del request.tokens[length:]
        while len(request.pages) > -(-length // size):
            self.let_go(request.pages.pop())
        return 0

    def evict(self, b: int, keep_last: int) -> None:
        request, size = self.requests[b], self.page_size
        kept = {t // size for t in range(len(request.tokens)) if t < self.sinks or t >= len(request.tokens) - keep_last}
        for block in reversed(range(len(request.pages))):
            if block not in kept:
                page, request.pages[block] = request.pages[block], -1
                self.seen["pages evicted"] += page >= 0
                self.let_go(page)

    def let_go(self, page: int) -> None:
        if page >= 0 and self.holders(page) == 0:
            self.free.append(page)
        elif page >= 0:
            self.seen["shared pages kept"] += 1

    def fork(self, source: int, destination: int) -> None:
        request = self.requests[source]
        self.requests[destination] = Request(list(request.tokens), list(request.pages))


class Cache:
    """The same by the ops, with what was written to each slot."""

    def __init__(
        self, pages: range, page_size: int, columns: int, counts: bool, null_page: int, slots: bool, backend: str
    ):
        self.backend, self.page_size = backend, page_size
        self.rows, self.skipped = (ROWS, 1) if slots else (list(range(B)), 0)
        R, P = B + 2 * slots, pages.stop
        self.state = State(
            ints([0] * R), ints([[null_page] * columns] * R), ints([*pages, *[-7] * pages.start]), ints([len(pages)]), page_size,
            ints([0] * P) if counts else None, ints([-1, *ROWS]) if slots else None, null_page,
        )  # fmt: skip
        self.written: dict[tuple[int, int], int] = {}

    def append(self, tokens: list[list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
        counts = [5] * self.skipped + [len(t) for t in tokens]
        out = sk.AppendOutput(*(t.tolist() for t in self.state.append(counts, MAX_NEW, self.backend)))
        if self.skipped:
            assert [field.pop(0) for field in out] == [[-1] * MAX_NEW, -1, -1, 0]
        copies = list(zip(out.copy_src, out.copy_dst, strict=True))
        for source, destination in copies:
            for offset in range(self.page_size if source >= 0 else 0):
                self.written[destination, offset] = self.written.get((source, offset), -1)
        used = [slot for row in out.slots for slot in row if slot >= 0]
        assert len(used) == len(set(used)), "two tokens in one slot"
        for row, new, status in zip(out.slots, tokens, out.status, strict=True):
            count = 0 if status else len(new)
            assert all(slot >= 0 for slot in row[:count]) and all(slot == -1 for slot in row[count:])
            for slot, token in zip(row, new[:count], strict=False):
                self.written[divmod(slot, self.page_size)] = token
        return out.status, copies

    def rollback(self, rejected: list[int], **options) -> list[int]:
        return self.state.rollback([5] * self.skipped + rejected, self.backend, **options)[self.skipped :]

    def evict(self, keep_last: int, sinks: int) -> list[int]:
        return self.state.evict(keep_last, self.backend, sinks=sinks)[self.skipped :]

    def fork(self, source: int, destination: int) -> None:
        s, source, destination = self.state, self.rows[source], self.rows[destination]
        s.block_table[destination] = s.block_table[source]
        s.seq_lens[destination] = s.seq_lens[source]
        held = s.block_table[source]
        s.ref_counts[held[held != s.null_page].long()] += 1

    def check(self, model: Model) -> None:
        s = self.state
        whole, lengths, none = s.block_table.tolist(), s.seq_lens.tolist(), s.null_page
        table = [whole[row] for row in self.rows]
        assert [lengths[row] for row in self.rows] == [len(r.tokens) for r in model.requests]
        assert table == [
            [none if page < 0 else page for page in r.pages] + [none] * (model.columns - len(r.pages))
            for r in model.requests
        ]
        assert all(lengths[row] == 0 and whole[row] == [none] * model.columns for row in OTHERS if self.skipped)
        assert s.free() == model.free
        for row, request in zip(table, model.requests, strict=True):
            places = ((row[t // self.page_size], t % self.page_size) for t in range(len(request.tokens)))
            assert all(
                p[0] == none or self.written[p] == token for p, token in zip(places, request.tokens, strict=True)
            )
        holds = Counter(itertools.chain.from_iterable(request.pages for request in model.requests))
        counts = [holds[page] for page in model.pages]
        if s.ref_counts is not None:
            assert s.ref_counts.tolist() == [0] * model.pages.start + counts
        free = set(model.free)
        assert len(free) == len(model.free), "a page was freed twice"
        assert all((page in free) == (count == 0) for page, count in zip(model.pages, counts, strict=True)), (
            "a page leaked"
        )


def run(
    backend: str,
    page_size: int,
    pages: int,
    columns: int,
    counts: bool,
    window: int | None,
    sinks: int,
    null_page: int,
    slots: bool,
    operations: list[int],
) -> Counter:
    """Each operation is drawn as one number, whose digits say what, who and how much; returns what happened."""
    sinks = 0 if window is None else sinks
    numbers = range(null_page + 1, pages + null_page + 1)  # without page 0 where that is the null page
    model = Model(numbers, page_size, columns, window, sinks)
    cache = Cache(numbers, page_size, columns, counts, null_page, slots, backend)
    names = itertools.count()
    for number in operations:
        kind, number = number % 8, number // 8
        who, number = number % B, number // B
        other, number = number % B, number // B
        amounts = [number // (MAX_NEW + 1) ** b % (MAX_NEW + 1) for b in range(B)]
        if kind < 4:  # append, or a step that verifies and takes some of it back
            tokens = [[next(names) for _ in range(n)] for n in amounts]
            want = [model.append(b, new) for b, new in enumerate(tokens)]
            assert list(zip(*cache.append(tokens), strict=True)) == want
            if kind < 2:
                rejected = [(n + who) % (n + 1) for n in amounts]
            else:
                rejected = [0] * B
        elif kind == 4:
            rejected = [n * page_size // 2 for n in amounts]
        elif kind == 5:
            rejected = [1000 * (b == who) for b in range(B)]
        else:
            rejected = [1000 * (b == who and who != other and counts) for b in range(B)]
        want = [model.rollback(b, n) for b, n in enumerate(rejected)]
        assert cache.rollback(rejected, window=window, sinks=sinks) == want
        if kind >= 6 and who != other and counts:
            cache.fork(other, who)
            model.fork(other, who)
        if window is not None and number // (MAX_NEW + 1) ** B % 2:
            keep_last = max(window - 3 + amounts[who], 1)  # less than the window needs, or more
            assert cache.evict(keep_last, sinks) == [0] * B
            for b in range(B):
                model.evict(b, keep_last)
        cache.check(model)
    return model.seen + Counter(operations=len(operations))


@pytest.mark.usefixtures("one_thread")
def test_agrees_with_the_model(backend):
    """Contents, lengths, tables, free list and counts after each operation; no page leaks or is freed twice."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES[backend], derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate) if backend == "triton" else tuple(Phase),  # shrinking takes minutes there
    )  # fmt: skip
    @given(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pages=st.integers(1, 24),
        columns=st.integers(1, 12),
        counts=st.booleans(),
        window=st.sampled_from([None] * 4 + [*range(1, 9)]),
        sinks=st.sampled_from([0, 0, 1, 4, 9]),
        null_page=st.sampled_from([-1, -1, 0]),
        slots=st.sampled_from([False, False, True]),
        operations=st.lists(st.integers(0, 2**20 - 1), min_size=LENGTH, max_size=LENGTH),
    )
    @example(**EVERYTHING)
    def property_(**drawn):
        seen.update(run(backend, **drawn))

    property_()
    assert seen["operations"] >= EXAMPLES[backend] * LENGTH
    kinds = ("table full", "out of pages", "copies", "shared pages kept", "pages evicted", "refused")
    happened = min(seen[name] for name in kinds)
    assert happened * 1000 >= seen["operations"], seen
