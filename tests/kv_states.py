"""States of a paged cache for the tests of `kv_rollback`, `kv_append_slots` and `kv_evict`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

import python_ref
import specdec_kernels as sk
from tests.cases import generator


@dataclass
class State:
    """What these ops take, as tensors."""

    seq_lens: Tensor
    block_table: Tensor
    free_pages: Tensor
    num_free: Tensor
    page_size: int
    ref_counts: Tensor | None = None
    slots: Tensor | None = None
    null_page: int = -1

    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def copy(self, **changes) -> State:
        return replace(self, **{name: t.clone() for name, t in self.tensors().items()} | changes)

    def lists(self) -> dict:
        """As the oracle takes it."""
        named = {name: t.tolist() for name, t in self.tensors().items()}
        return {"ref_counts": None, "slots": None, **named, "page_size": self.page_size, "null_page": self.null_page}

    def free(self) -> list[int]:
        return self.free_pages[: int(self.num_free)].tolist()

    def rollback(self, num_rejected, backend: str, **options) -> list[int]:
        return self.rollback_on_device(num_rejected, backend, **options).tolist()

    def call(self, op, backend: str, **options):
        return op(**self.tensors(), page_size=self.page_size, null_page=self.null_page, backend=backend, **options)

    def rollback_on_device(self, num_rejected, backend: str, **options) -> Tensor:
        return self.call(sk.kv_rollback, backend, num_rejected=ints(num_rejected), **options)

    def append(self, num_new, max_new: int, backend: str, **options) -> sk.AppendOutput:
        return self.call(sk.kv_append_slots, backend, num_new=ints(num_new), max_new=max_new, **options)

    def evict(self, keep_last: int, backend: str, **options) -> list[int]:
        return self.call(sk.kv_evict, backend, keep_last=keep_last, **options).tolist()


def ints(values) -> Tensor:
    return values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int32)


def make_state(
    lengths, page_size: int, M: int, *, spare: int = 8, room: int = 0, counts: bool = True, share: float = 0.0, seed=0
) -> State:
    """Requests of these lengths with pages of their own, or, with probability `share` a block, the page that an earlier request
    has there. `spare` pages are free and the list has room for `room` entries beyond all pages (which exist but are nobody's)."""
    g = generator("kv", seed, len(lengths), page_size)
    blocks = [-(-n // page_size) for n in lengths]
    P = max(sum(blocks) + spare + room, 1)
    pages = torch.randperm(P, generator=g).tolist()
    table = [[-1] * M for _ in lengths]
    refs = [0] * P
    for b, count in enumerate(blocks):
        for m in range(count):
            others = [row[m] for row in table[:b] if row[m] >= 0]
            if others and torch.rand((), generator=g) < share:
                table[b][m] = others[int(torch.randint(len(others), (), generator=g))]
            else:
                table[b][m] = pages.pop()
            refs[table[b][m]] += 1
    free = pages[: len(pages) - room]
    state = State(
        ints(list(lengths)),
        ints(table).view(len(lengths), M),
        ints(free + [-7] * (P - len(free))),
        ints([len(free)]),
        page_size,
    )
    return replace(state, ref_counts=ints(refs)) if counts else state


def damage(state: State, seed: int = 0) -> State:
    """The same with some entries, counts and lengths that no sound state has."""
    g = generator("damage", seed)
    state = state.copy()
    P = state.free_pages.shape[0]
    hit = lambda t, p: torch.rand(t.shape, generator=g) < p  # noqa: E731
    for value in (-1, -5, P, 2**31 - 1, -(2**31)):
        state.block_table[hit(state.block_table, 0.04)] = value
    state.seq_lens[hit(state.seq_lens, 0.05)] = -3
    state.seq_lens[hit(state.seq_lens, 0.05)] += 3 * state.page_size
    if state.ref_counts is not None:
        for value in (0, -2, 1, 2, 3):
            state.ref_counts[hit(state.ref_counts, 0.06)] = value
    return state


def with_another_page(state: State) -> State:
    """The same with one page more, the last, that nobody holds. Its count is junk."""
    refs = None if state.ref_counts is None else torch.cat([state.ref_counts, ints([777])])
    return state.copy(free_pages=torch.cat([state.free_pages, ints([-7])]), ref_counts=refs)


def renumbered(pages: Tensor, P: int, null_page: int) -> Tensor:
    """The last page takes number `null_page`, those from there on move up, and -1 becomes `null_page`."""
    pages = torch.where((pages >= null_page) & (pages < P - 1), pages + 1, pages)
    return torch.where(pages == -1, null_page, pages)


def with_null_page(state: State, null_page: int) -> State:
    """The same by other numbers, in a cache whose last page nobody holds: that one is given up for "no page" in place of -1."""
    P, refs = state.free_pages.shape[0], state.ref_counts
    if refs is not None:
        refs = torch.cat([refs[:null_page], refs[P - 1 :], refs[null_page : P - 1]])
    pages = {name: renumbered(getattr(state, name), P, null_page) for name in ("block_table", "free_pages")}
    return state.copy(**pages, ref_counts=refs, null_page=null_page)


def at_slots(state: State, seed: int = 0, dtype=torch.int32, skips: bool = True) -> State:
    """The same with the requests' rows among others, which hold junk, in an order of its own. With `skips` every fourth
    request from the second on has a slot that is no row."""
    g = generator("slots", seed)
    B, M = state.block_table.shape
    R = B + 3
    slots = torch.randperm(R, generator=g)[:B]
    seq_lens = torch.full((R,), 987, dtype=torch.int32)
    block_table = torch.randint(-9, state.free_pages.shape[0], (R, M), generator=g, dtype=torch.int32)
    seq_lens[slots], block_table[slots] = state.seq_lens, state.block_table
    if skips:
        none = torch.tensor([-1, R, 2**31 - 1, -(2**31), *([2**40 + 1] if dtype == torch.int64 else [])])
        none = none[torch.randint(len(none), (B,), generator=g)]
        slots = torch.where(torch.arange(B) % 4 == 1, none, slots)
    return state.copy(seq_lens=seq_lens, block_table=block_table, slots=slots.to(dtype))


def assert_same_state(state: State, lists: dict, what="") -> None:
    for name, tensor in state.tensors().items():
        assert tensor.tolist() == lists[name], (what, name)


def assert_rollback_as_oracle(state: State, num_rejected, backend: str, what="", **options) -> list[int]:
    """Rolls `state` back on `backend`; everything as the oracle leaves it. Returns the status."""
    lists = state.lists()
    windows = {name: options[name] for name in ("window", "sinks") if name in options}
    want = python_ref.kv_rollback(num_rejected=ints(num_rejected).tolist(), **lists, **windows)
    assert state.rollback(num_rejected, backend, **options) == want, what
    assert_same_state(state, lists, what)
    return want


def assert_evict_as_oracle(state: State, keep_last: int, backend: str, what="", sinks=0, **options) -> list[int]:
    lists = state.lists()
    want = python_ref.kv_evict(keep_last=keep_last, sinks=sinks, **lists)
    assert state.evict(keep_last, backend, sinks=sinks, **options) == want, what
    assert_same_state(state, lists, what)
    return want


def assert_append_as_oracle(state: State, num_new, max_new: int, backend: str, what="", **options) -> sk.AppendOutput:
    lists = state.lists()
    want = python_ref.kv_append_slots(num_new=ints(num_new).tolist(), max_new=max_new, **lists)
    got = state.append(num_new, max_new, backend, **options)
    for name in want._fields:
        assert getattr(got, name).tolist() == getattr(want, name), (what, name)
    assert_same_state(state, lists, what)
    return got
