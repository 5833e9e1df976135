"""Sliding windows, attention sinks and budgets of a paged cache: `kv_rollback(window=)` with `kv_evict`."""

import itertools

import pytest
import torch
import torch._dynamo.testing

import specdec_kernels as sk
from specdec_kernels import CacheStatus
from tests.cases import assert_same_bits, generator
from tests.kv_states import State, assert_rollback_as_oracle, damage, ints, make_state

EVICTED, BAD = CacheStatus.EVICTED, CacheStatus.BAD_PAGE


def tensors(state: State) -> list[torch.Tensor]:
    return list(state.copy().tensors().values())


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 7, 40, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_parity(page_size, B, counts, backend):
    """As the oracle: within the window and past it, requests that end, shared pages, damaged states."""
    for seed in range(2 if B < 40 else 1):
        g = generator("windows", B, page_size, seed)
        lengths = torch.randint(6 * page_size, (B,), generator=g).tolist()
        sinks, window = page_size * seed, page_size + 5
        state = make_state(lengths, page_size, 7, share=0.5 * counts, counts=counts, seed=seed)
        state.evict(window + 8, "eager", sinks=sinks)
        drafts = torch.randint(17, (B,), generator=g, dtype=torch.int32)
        several = torch.randint(-2, 7 * page_size, (B,), generator=g, dtype=torch.int32)
        ending = torch.where(torch.rand(B, generator=g) < 0.5, state.seq_lens, drafts)
        for rejected in (drafts, several, ending) if B < 256 or backend != "triton" else (several,):
            what, options = (seed, rejected), {"window": window, "sinks": sinks}
            status = assert_rollback_as_oracle(state.copy(), rejected, backend, what, **options)
            assert set(status) <= {0, EVICTED}
            assert_rollback_as_oracle(damage(state, seed), rejected, backend, ("damaged", *what), **options)


def test_sliding_window_rollback(backend):
    """A window of six over pages of four, of which the first two were evicted (positions 0 .. 7). A rollback to 13 leaves a token
    that reads from 8 on; one to 12 needs position 7, and is refused whole, however many requests beside it are served."""
    table = [[-1, -1, 4, 7, 1, -1], [-1, -1, 3, 6, 0, -1], [-1, -1, 2, 9, 5, -1], [8, 10, 11, -1, -1, -1]]
    state = State(ints([18, 18, 18, 10]), ints(table), ints([-7] * 12), ints([0]), 4, ints([1] * 12))
    before = state.copy()
    assert state.rollback([5, 6, 0, 6], backend, window=6) == [0, EVICTED, 0, 0]
    assert state.seq_lens.tolist() == [13, 18, 18, 4]
    assert state.block_table.tolist() == [[-1, -1, 4, 7, -1, -1], *table[1:3], [8, *[-1] * 5]]
    assert state.free() == [1, 11, 10]
    assert state.ref_counts.tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]

    refused = before.copy()
    assert refused.rollback([17, 6, 9, 0], backend, window=6) == [EVICTED] * 3 + [0]
    assert_same_bits(tensors(refused), tensors(before))
    # The refused request goes on: it may lose fewer tokens, grow, or end.
    assert state.rollback([0, 5, 0, 0], backend, window=6) == [0] * 4
    assert state.append([0, 4, 0, 0], 4, backend).slots[1].tolist() == [25, 26, 27, 0]
    assert state.rollback([0, 17, 18, 0], backend, window=6) == [0, 0, 0, 0]
    assert state.seq_lens.tolist() == [13, 0, 0, 4] and state.block_table[1:3].tolist() == [[-1] * 6] * 2


def test_without_a_window_entries_that_are_gone_are_bad_pages(backend):
    """And with one they are passed over; other entries that are no pages are not."""
    table = [[-1, -1, 4], [-1, 99, 5], [-1, -1, -1]]
    state = State(ints([11, 11, 11]), ints(table), ints([-7] * 6), ints([0]), 4)
    plain = state.copy()
    assert plain.rollback([11] * 3, backend) == [BAD] * 3
    assert state.rollback([11] * 3, backend, window=4) == [0, BAD, 0]
    for rolled in (plain, state):
        assert rolled.block_table.tolist() == [[-1] * 3] * 3
        assert rolled.free() == [4, 5] and rolled.seq_lens.tolist() == [0] * 3


def test_one_entry_tells(backend):
    """EVICTED exactly where a position that the next token reads, or the block that it is written to, is gone: all lengths before
    and after, judged here position by position. Windows of 1, ends of pages, sinks past the text, sinks whose last block is the
    window's first."""
    longest, refusals = 21, 0
    pairs = [(old, new) for old in range(1, longest + 1) for new in range(old)]
    combinations = [*itertools.product((1, 2, 4), (1, 2, 3, 4, 5, 9), (0, 1, 4, 6, 30), (1, 2, 4, 9))]
    lengths, after = ([pair[i] for pair in pairs] for i in (0, 1))
    states = {page_size: make_state(lengths, page_size, longest, counts=False) for page_size in (1, 2, 4)}
    for page_size, window, sinks, keep_last in combinations[:: 1 if backend == "native" else 41]:
        state = states[page_size].copy()
        state.evict(keep_last, backend, sinks=sinks)
        want = []
        for row, new in zip(state.block_table.tolist(), after, strict=True):
            needed = {*range(max(new - window + 1, 0), new), *range(min(sinks, new))}
            if new % page_size:
                needed.add(new - 1)
            want.append(EVICTED if any(row[p // page_size] == -1 for p in needed) else 0)
        rejected = [old - new for old, new in pairs]
        got = assert_rollback_as_oracle(state, rejected, backend, window=window, sinks=sinks)
        assert got == want, (page_size, window, sinks, keep_last)
        refusals += sum(map(bool, want))
    assert refusals > 20


def test_tables_that_are_too_short(backend):
    """The length says that the window has blocks past the table: they are gone too. Nothing is read there."""
    state = State(ints([40, 40, 40]), ints([[0, 1], [2, 3], [4, 5]]), ints([-7] * 6), ints([0]), 4)
    assert state.rollback([1, 40, 33], backend, window=8) == [EVICTED, BAD, BAD]
    assert state.seq_lens.tolist() == [40, 0, 7] and state.free() == [3, 2]
    state.block_table[0, 1] = 77  # no page either
    assert state.rollback([33, 0, 0], backend, window=3) == [EVICTED, 0, 0]


def test_extremes_of_window_and_sinks(backend):
    state = State(ints([2**31 - 1, 9]), ints([[0, 1, 2]] * 2), ints([-7] * 3), ints([0]), 2**30)
    for options in ({"window": 2**31 - 1}, {"window": 1}, {"window": 5, "sinks": 2**31 - 1}):
        assert assert_rollback_as_oracle(state.copy(), [2**30, 8], backend, **options) == [0, 0]
    state.block_table[:, 0] = -1
    want = [EVICTED, EVICTED]
    assert assert_rollback_as_oracle(state.copy(), [2**30, 8], backend, window=2**31 - 1) == want


class Text:
    """One request on a cache with a window, or a budget, step by step; pages are found again in no more steps than they leave."""

    def __init__(self, page_size: int, pages: int, backend: str):
        self.backend = backend
        self.state = State(
            ints([0]), ints([[-1] * 200]), ints(list(range(pages))), ints([pages]), page_size, ints([0] * pages)
        )  # fmt: skip
        self.total = pages

    def append(self, count: int) -> None:
        for start in range(0, count, 50):
            assert self.state.append([min(50, count - start)], 50, self.backend).status.tolist() == [0]

    def held(self) -> list[int]:
        row = self.state.block_table[0].tolist()
        held = [m for m, page in enumerate(row) if page >= 0]
        assert len(held) + len(self.state.free()) == self.total
        assert sorted([row[m] for m in held] + self.state.free()) == list(range(self.total))
        assert int(self.state.ref_counts.sum()) == len(held)
        return held


@pytest.mark.parametrize("page_size, sinks", [(1, 0), (4, 0), (4, 6), (16, 4)])
def test_a_windows_worth_is_enough(page_size, sinks, backend):
    """With keep_last = w + d a step of d drafts is never refused, whatever it rejects, also taken back whole; a token less and
    the whole step is not there any more. The pages held are those of w + d tokens and the sinks."""
    window, d = 9, 5
    g = generator("steps", page_size, sinks)
    options = {"window": window, "sinks": sinks}
    text = Text(page_size, 60, backend)
    text.append(2 * window)
    for _ in range(40 if backend == "native" else 8):
        text.append(d + 1)
        assert text.state.evict(window + d, backend, sinks=sinks) == [0]
        most = -(-(window + d) // page_size) + 1 + -(-sinks // page_size)
        held = text.held()
        assert len(held) <= most and held[: -(-sinks // page_size)] == list(range(-(-sinks // page_size)))
        whole = text.state.copy()
        assert whole.rollback([d + 1], backend, **options) == [0]
        assert text.state.rollback([int(torch.randint(d + 1, (), generator=g))], backend, **options) == [0]
        text.held()
    if page_size == 1:
        text.append(d + 1)
        text.state.evict(window + d - 1, backend, sinks=sinks)
        assert text.state.copy().rollback([d], backend, **options) == [0]
        assert text.state.rollback([d + 1], backend, **options) == [EVICTED]


@pytest.mark.parametrize("page_size", [1, 16])
def test_budget_of_a_drafter(page_size, backend):
    """A drafter that keeps 4 sinks and its last 64 entries: after each verified block the rejected ones go and what is past the
    budget is dropped. Hundreds of steps never hold more than the budget's pages, and the sinks' stay where they were."""
    budget, block, sinks = 64, 8, 4
    g = generator("budget", page_size)
    pages = -(-(budget + block) // page_size) + 1 + -(-sinks // page_size)
    text = Text(page_size, pages, backend)
    text.state.block_table = torch.full((1, 3000), -1, dtype=torch.int32)
    text.append(20)
    first, most = text.state.block_table[0, : -(-sinks // page_size)].tolist(), 0
    for _ in range(300 if backend == "native" else 12):
        text.append(block)
        rejected = int(torch.randint(block + 1, (), generator=g))
        assert text.state.rollback([rejected], backend, window=budget - block, sinks=sinks) == [0]
        assert text.state.evict(budget, backend, sinks=sinks) == [0]
        held = text.held()
        most = max(most, len(held))
        length = int(text.state.seq_lens[0])
        assert {p // page_size for p in (*range(sinks), *range(max(length - budget, 0), length))} <= set(held)
    assert text.state.block_table[0, : len(first)].tolist() == first
    assert backend != "native" or (length > 1000 and most <= -(-budget // page_size) + 1 + len(first))


def test_hybrid_models(backend):
    """A table for each kind of layer: the sliding kind is rolled back first, and what it refused the other kind is not asked."""
    sliding = State(ints([10, 10]), ints([[-1, 1, 2], [-1, 4, 5]]), ints([0, 3, *[-7] * 4]), ints([2]), 4)
    full = State(ints([10, 10]), ints([[0, 1, 2], [3, 4, 5]]), ints([-7] * 6), ints([0]), 4)
    rejected = ints([3, 2])
    status = torch.tensor(sliding.rollback(rejected, backend, window=5))
    assert status.tolist() == [EVICTED, 0]
    assert full.rollback(rejected.masked_fill((status & EVICTED) != 0, 0), backend) == [0, 0]
    assert full.seq_lens.tolist() == sliding.seq_lens.tolist() == [10, 8]


def compiled_step(seq_lens, rejected, table, free_pages, num_free, refs, backend):
    cache = (table, free_pages, num_free, 4)
    status = sk.kv_rollback(seq_lens, rejected, *cache, ref_counts=refs, window=6, sinks=3, backend=backend)
    return status + sk.kv_evict(seq_lens, 8, *cache, sinks=3, ref_counts=refs, backend=backend), table + 0


def test_compiles_whole(backend):
    torch._dynamo.reset()
    fn = torch.compile(compiled_step, fullgraph=True, backend="aot_eager")
    state = make_state([9, 17, 14, 3], 4, 6, share=0.3)
    states = [tensors(state) for _ in range(2)]
    got, want = (
        run(s[0], ints([3] * 4), *s[1:], backend) for run, s in zip((fn, compiled_step), states, strict=True)
    )  # fmt: skip
    assert_same_bits(list(got), list(want))
    assert_same_bits(*states)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, r"window must be an int in 1..2147483647, got int 0"),
        ({"window": True}, "window must be an int .*got bool True"),
        ({"window": 4.0}, "window must be an int .*got float 4.0"),
        ({"window": 2**31}, "window must be an int .*got int 2147483648"),
        ({"window": 4, "sinks": -1}, r"sinks must be an int in 0..2147483647, got int -1"),
        ({"window": 4, "sinks": None}, "sinks must be an int .*got NoneType None"),
        ({"sinks": 4}, "sinks must be 0 without a window, got int 4"),
    ],
    ids=str,
)
def test_errors_name_the_argument(options, message, backend):
    state = make_state([9, 3], 4, 3)
    before = state.copy()
    with pytest.raises(ValueError, match="^kv_rollback: " + message):
        state.rollback([2, 1], backend, **options)
    assert_same_bits(tensors(state), tensors(before))
