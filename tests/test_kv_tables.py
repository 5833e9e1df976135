"""`null_page` and `slots`: the paged cache's ops on tables as engines have them, with a page given up for "no page" and the rows of
all requests."""

import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from specdec_kernels import CacheStatus
from tests.cases import assert_same_bits, generator
from tests.conftest import available
from tests.kv_states import (
    State,
    assert_append_as_oracle,
    assert_evict_as_oracle,
    assert_rollback_as_oracle,
    at_slots,
    damage,
    ints,
    make_state,
    renumbered,
    with_another_page,
    with_null_page,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")

BAD, EVICTED, OUT = CacheStatus.BAD_PAGE, CacheStatus.EVICTED, CacheStatus.OUT_OF_PAGES


def some_state(B: int, page_size: int, seed: int, counts=True) -> State:
    """With a page more than the requests know of."""
    lengths = torch.randint(5 * page_size, (B,), generator=generator("tables", B, page_size, seed)).tolist()
    return with_another_page(make_state(lengths, page_size, 7, spare=B, share=0.4 * counts, counts=counts, seed=seed))


def operations(state: State, seed: int, batch: int) -> dict:
    """Name of an op -> its arguments beside the state, for a batch of so many requests."""
    g = generator("operations", seed)
    amounts = lambda end: torch.randint(-1, end, (batch,), generator=g).tolist()  # noqa: E731
    window = {"window": state.page_size + 3, "sinks": seed % 3}
    return {
        "kv_append_slots": {"num_new": amounts(2 * state.page_size), "max_new": 9},
        "kv_rollback": {"num_rejected": amounts(4 * state.page_size)},
        "kv_evict": {"keep_last": state.page_size + 1, "sinks": seed % 3},
        "kv_rollback windowed": {"num_rejected": amounts(4 * state.page_size), **window},
    }


def oracle(name: str, lists: dict, arguments: dict):
    return getattr(python_ref, name.split()[0])(**lists, **arguments)


@pytest.fixture(params=["oracle", "native", "eager", "triton"])
def who(request):
    return request.param if request.param == "oracle" else available(request.param)


def call(who: str, name: str, state: State, **arguments):
    """Result of an op, as lists, on a backend or by the oracle."""
    if who == "oracle":
        lists = state.lists()
        result = oracle(name, lists, arguments)
        for field, t in state.tensors().items():
            t.copy_(torch.tensor(lists[field]))
        return result
    given = {key: ints(value) if isinstance(value, list) else value for key, value in arguments.items()}
    result = state.call(getattr(sk, name), who, **given)
    return result.tolist() if isinstance(result, torch.Tensor) else sk.AppendOutput(*(t.tolist() for t in result))


# --- the oracles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_null_page_is_another_name_for_no_page(seed):
    """With pages renumbered so that -1 is `null_page` the oracles do what they do without one, on sound and damaged states."""
    state = some_state(5, (1, 4)[seed % 2], seed, counts=seed % 3 > 0)
    P, size = state.free_pages.shape[0], state.page_size
    for plain in (state, damage(state, seed)):
        for null_page in (0, P // 2, P - 1):
            for name, arguments in operations(state, seed, 5).items():
                named = with_null_page(plain, null_page)
                lists, want = named.lists(), plain.lists()
                got, expected = oracle(name, lists, arguments), oracle(name, want, arguments)
                changed = {key: ints(value) for key, value in want.items() if isinstance(value, list)}
                changed = with_null_page(plain.copy(**changed), null_page)
                for field, t in changed.tensors().items():
                    assert lists[field] == t.tolist(), (name, field, null_page)
                if name == "kv_append_slots":
                    slots = torch.tensor(expected.slots)
                    renamed = renumbered(slots // size, P, null_page) * size + slots % size
                    copies = [torch.where(t < 0, t, renumbered(t, P, null_page)) for t in map(ints, expected[1:3])]
                    slots = torch.where(slots < 0, slots, renamed)
                    expected = (slots.tolist(), *(t.tolist() for t in copies), expected.status)
                assert tuple(got) == tuple(expected), (name, null_page)


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_rows(seed):
    """With slots the oracles do what they do with the batch's rows alone, put back where they are from; other rows stay."""
    state = some_state(7, (1, 4)[seed % 2], seed, counts=seed % 3 > 0)
    for plain in (state, damage(state, seed)):
        spread = at_slots(plain, seed)
        kept = [(b, r) for b, r in enumerate(spread.slots.tolist()) if 0 <= r < spread.seq_lens.shape[0]]
        batch, rows = ([pair[i] for pair in kept] for i in (0, 1))
        assert len(kept) == 5
        for name, arguments in operations(state, seed, 7).items():
            lists = spread.lists()
            few = plain.copy(seq_lens=spread.seq_lens[rows], block_table=spread.block_table[rows]).lists()
            for_few = {k: [v[b] for b in batch] if isinstance(v, list) else v for k, v in arguments.items()}
            got, want = oracle(name, lists, arguments), oracle(name, few, for_few)
            expected = spread.lists() | {key: few[key] for key in ("free_pages", "num_free", "ref_counts")}
            for field in ("seq_lens", "block_table"):
                for row, value in zip(rows, few[field], strict=True):
                    expected[field][row] = value
            assert lists == expected, name
            nothing = ([-1] * 9, -1, -1, 0) if name == "kv_append_slots" else (0,)
            got, want = ((r if name == "kv_append_slots" else (r,)) for r in (got, want))
            for all_of, of_few, none in zip(got, want, nothing, strict=True):
                assert all_of == [of_few[batch.index(b)] if b in batch else none for b in range(7)], name


# --- by hand --------------------------------------------------------------------------------------------------------------


def test_eviction_with_block_0_for_no_page(who):
    """A table as vLLM's: block 0 stands for no page. Eviction stops at it and pushes, counts and writes nothing of it; a rollback
    into what was evicted is refused; without a window its entries are no pages to release."""
    refs = [777, 0, 1, 0, 1, 1, 0, 1, 0]
    state = State(
        ints([21]), ints([[0, 2, 7, 5, 4, 0]]), ints([8, 6, *[-7] * 7]), ints([2]), 4, ints(refs), null_page=0
    )
    state.block_table[0, 5] = 3
    state.ref_counts[3] = 1
    assert call(who, "kv_evict", state, keep_last=5) == [0]
    assert state.block_table.tolist() == [[0, 0, 0, 0, 4, 3]] and state.free() == [8, 6, 5, 7, 2]
    assert state.ref_counts.tolist() == [777, 0, 0, 1, 1, 0, 0, 0, 0]
    evicted = state.copy()
    assert call(who, "kv_evict", evicted, keep_last=5) == [0] and evicted.lists() == state.lists()
    assert call(who, "kv_rollback", evicted, num_rejected=[3], window=4) == [EVICTED]
    assert evicted.lists() == state.lists()
    assert call(who, "kv_rollback", state.copy(), num_rejected=[3], window=2) == [0]
    assert call(who, "kv_rollback", evicted, num_rejected=[21], window=4) == [0]  # passed over
    assert call(who, "kv_rollback", state, num_rejected=[21]) == [BAD]
    for rolled in (state, evicted):
        assert rolled.block_table.tolist() == [[0] * 6] and rolled.free() == [8, 6, 5, 7, 2, 3, 4]
        assert rolled.ref_counts.tolist() == [777, *[0] * 8]


def test_null_page_is_never_handed_out(who):
    """Blocks of `null_page` get pages; a partly filled one is no block to write to, and on the free list it is no page."""
    state = State(
        ints([4, 0, 3]), ints([[1, 0, 0], [0, 0, 0], [0, 2, 0]]), ints([3, 4, 5, *[-7] * 3]), ints([3]), 4, null_page=0
    )
    got = call(who, "kv_append_slots", state, num_new=[2, 1, 1], max_new=2)
    assert got.slots == [[20, 21], [16, -1], [-1, -1]] and got.status == [0, 0, BAD]
    assert state.block_table.tolist() == [[1, 5, 0], [4, 0, 0], [0, 2, 0]] and state.free() == [3]
    state.free_pages[:2] = ints([3, 0])
    state.num_free.fill_(2)
    got = call(who, "kv_append_slots", state, num_new=[3, 1, 0], max_new=3)
    assert got.status == [BAD, 0, 0] and got.slots == [[-1] * 3, [17, -1, -1], [-1] * 3]
    assert state.free() == [3, 0] and state.seq_lens.tolist() == [6, 2, 3]


def test_null_page_is_never_shared(who):
    """Its count, whatever it is, makes no copy on write."""
    state = State(ints([4]), ints([[1, 2]]), ints([-7, -7, -7]), ints([0]), 4, ints([1, 1, 9]), null_page=2)
    got = call(who, "kv_append_slots", state.copy(), num_new=[1], max_new=1)
    assert got.status == [OUT] and got.copy_src == [-1]
    state.free_pages[0], state.num_free[0] = 0, 1
    got = call(who, "kv_append_slots", state, num_new=[1], max_new=1)
    assert got.slots == [[0]] and state.ref_counts.tolist() == [1, 1, 9] and state.block_table.tolist() == [[1, 0]]


def test_other_entries_are_still_bad(who):
    """-1 means nothing where `null_page` is another one: reported, passed, cleared to `null_page`."""
    table = ints([[3, -1, 4, 99], [-1, 1, 5, 2]])
    state = State(ints([13, 13]), table, ints([-7] * 6), ints([0]), 4, null_page=0)
    rolled = state.copy()
    assert call(who, "kv_rollback", rolled, num_rejected=[10, 2], window=3) == [BAD, 0]
    assert rolled.block_table.tolist() == [[3, 0, 0, 0], [-1, 1, 5, 0]] and rolled.free() == [4, 2]
    assert call(who, "kv_evict", state, keep_last=1) == [BAD, BAD]
    assert state.block_table.tolist() == [[0, 0, 0, 99], [0, 0, 0, 2]] and state.free() == [4, 3, 5, 1]


def test_slots_by_hand(who):
    """The batch's order decides who is served, not the table's; a padded row gets nothing and is not looked at."""
    table = [[1, -1], [9, 9], [2, -1], [3, -1]]
    state = State(
        ints([4, 10**6, 4, 2]), ints(table), ints([0, 4, *[-7] * 4]), ints([2]), 4, slots=ints([3, -1, 2, 0, 4])
    )
    got = call(who, "kv_append_slots", state, num_new=[3, 1, 5, 2, 2], max_new=5)
    assert got.slots == [[14, 15, 16, -1, -1], [-1] * 5, [-1] * 5, [0, 1, -1, -1, -1], [-1] * 5]
    assert got.status == [0, 0, CacheStatus.TABLE_FULL, 0, 0] and got.copy_src == got.copy_dst == [-1] * 5
    assert state.seq_lens.tolist() == [6, 10**6, 4, 5]
    assert state.block_table.tolist() == [[1, 0], [9, 9], [2, -1], [3, 4]] and state.free() == []
    assert call(who, "kv_rollback", state, num_rejected=[4, 7, 0, 6, 9]) == [0] * 5
    assert state.seq_lens.tolist() == [0, 10**6, 4, 1]
    assert state.block_table.tolist() == [[-1, -1], [9, 9], [2, -1], [3, -1]] and state.free() == [4, 0, 1]
    state.seq_lens[2:] = ints([9, 9])
    assert call(who, "kv_evict", state, keep_last=5) == [0] * 5
    assert state.block_table.tolist() == [[-1, -1], [9, 9], [-1, -1], [-1, -1]] and state.free() == [4, 0, 1, 3, 2]


# --- backends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 7, 300])
@pytest.mark.parametrize("page_size", [1, 16])
def test_parity(page_size, B, counts, backend):
    """As the oracles, with a null page, with slots of either dtype and with both, sound and damaged, a step's calls in turn."""
    few = B == 300 and backend == "triton"
    if few and (page_size == 1 or not counts):
        return
    for seed in range(1 if few else 3):
        sound = some_state(B, page_size, seed, counts)
        P = sound.free_pages.shape[0]
        for number, plain in enumerate((sound, damage(sound, seed))):
            null_page = (0, P - 1, P // 2)[(seed + number) % 3]
            dtype = (torch.int32, torch.int64)[(seed + number) % 2]
            named = with_null_page(plain, null_page)
            for state in (named, at_slots(plain, seed, dtype), at_slots(named, seed, dtype))[2 * few :]:
                arguments = operations(state, seed, B)
                what = (seed, number, state.null_page)
                assert_append_as_oracle(state, **arguments["kv_append_slots"], backend=backend, what=what)
                assert_rollback_as_oracle(state, **arguments["kv_rollback"], backend=backend, what=what)
                assert_evict_as_oracle(state, **arguments["kv_evict"], backend=backend, what=what)
                assert_rollback_as_oracle(state, **arguments["kv_rollback windowed"], backend=backend, what=what)


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
def test_scrub(counts, backend):
    """As the oracle: pages pushed and ends of pages become zero, found at the requests' slots; the null page and the pages of
    skipped requests keep their bits."""
    zeroed = 0
    for seed in range(4 if backend == "native" else 2):
        for plain in (state := some_state(6, 4, seed, counts), damage(state, seed)):
            state = at_slots(with_null_page(plain, (0, 3)[seed % 2]), seed, (torch.int32, torch.int64)[seed % 2])
            # A request that ends in a block of the null page: nothing there is its own.
            row = int(state.slots[0])
            state.seq_lens[row], state.block_table[row, 1] = 8, state.null_page
            rejected = [1, *operations(state, seed, 6)["kv_rollback"]["num_rejected"][1:]]
            cache = torch.rand(state.free_pages.shape[0], 4, 2) + 1
            lists = state.lists()
            before = list(lists["num_free"])
            python_ref.kv_rollback(num_rejected=rejected, **lists)
            del lists["page_size"]
            (want,) = python_ref.kv_scrub([cache], before=before, num_rejected=rejected, **lists)
            assert torch.equal(want[state.null_page], cache[state.null_page])
            zeroed += int((want == 0).sum())
            state.rollback(rejected, backend, scrub=[cache])
            assert_same_bits([cache], [want])
            lists = state.lists()
            free = list(lists["num_free"])
            python_ref.kv_evict(keep_last=3, **lists)
            (want,) = python_ref.kv_scrub(
                [cache], lists["free_pages"], free, lists["num_free"], null_page=state.null_page
            )
            state.evict(3, backend, scrub=[cache])
            assert_same_bits([cache], [want])
    assert zeroed > 50


def test_compact_leaves_the_null_page(backend):
    """A node or a place in a block without a page does not move, also where its number is one of the cache's."""
    for index in (torch.int32, torch.int64):
        cache = torch.arange(1.0, 21.0).view(5, 4, 1, 1)
        table = torch.tensor([[1, 0, 2], [0, 3, 4], [4, 0, 0]], dtype=index)
        path, lengths = ints([[3, 6], [5, 6], [-1, -1]]), torch.tensor([2, 2, 0])
        want = python_ref.kv_compact([cache], path, lengths, block_table=table, null_page=0)
        plain = python_ref.kv_compact([cache], path, lengths, block_table=table)
        sk.kv_compact([cache], path, lengths, block_table=table, null_page=0, backend=backend)
        assert_same_bits([cache], want)
        assert cache[0].flatten().tolist() == [1, 2, 3, 4] and not torch.equal(plain[0], want[0])
        assert cache[3].flatten().tolist() == [17, 14, 15, 16]  # position 8 moved to 4, 7 not to 3
        assert cache[1].flatten().tolist() == [5, 6, 7, 8]  # 5 is without a page and did not move to 3


def test_slots_given_twice_stay_inside(backend):
    """The results are nobody's to rely on, but what is around the tables stays as it is."""
    for seed in range(20 if backend == "native" else 2):
        plain = some_state(9, 4, seed)
        state = at_slots(plain, seed)
        g = generator("twice", seed)
        state.slots = torch.randint(-1, 3, (9,), generator=g)
        guards = []
        for name, t in state.tensors().items():
            whole = torch.full((t.shape[0] + 8, *t.shape[1:]), 12345, dtype=t.dtype)
            whole[4:-4] = t
            guards.append(whole)
            setattr(state, name, whole[4:-4])
        for _ in range(3):
            arguments = operations(state, seed, 9)
            cache = torch.ones(state.free_pages.shape[0] + 1, 4, 2)
            state.append(**arguments["kv_append_slots"], backend=backend)
            state.rollback(**arguments["kv_rollback windowed"], backend=backend, scrub=[cache[:-1]])
            state.evict(**arguments["kv_evict"], backend=backend)
            state.rollback(**arguments["kv_rollback"], backend=backend)
        for whole in (*guards, cache[-1]):
            assert ((whole[:4] == 12345) & (whole[-4:] == 12345)).all() or whole.eq(1).all()


def compiled_step(seq_lens, amounts, table, free_pages, num_free, refs, slots, backend):
    cache, options = (table, free_pages, num_free, 4), {"ref_counts": refs, "slots": slots, "null_page": 0}
    placed = sk.kv_append_slots(seq_lens, amounts, *cache, max_new=5, **options, backend=backend)
    status = sk.kv_rollback(seq_lens, amounts, *cache, window=6, **options, backend=backend)
    return placed.slots, status + sk.kv_evict(seq_lens, 8, *cache, **options, backend=backend), table + 0


def test_compiles_whole_with_dynamic_batches(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for B in (4, 7, 5):
        state = at_slots(with_null_page(some_state(B, 4, 0), 0))
        states = [list(state.copy().tensors().values()) for _ in range(2)]
        got, want = (
            run(s[0], ints([3] * B), *s[1:], backend) for run, s in zip((fn, compiled_step), states, strict=True)
        )  # fmt: skip
        assert_same_bits(list(got), list(want))
        assert_same_bits(*states)
    assert counter.frame_count <= 2


def test_empty_batch(backend):
    state = at_slots(make_state([5, 3], 4, 3))
    state.slots = state.slots[:0]
    before = state.copy()
    assert state.rollback([], backend) == [] and state.evict(1, backend) == []
    assert state.append([], 5, backend).slots.shape == (0, 5)
    assert state.lists() == before.lists()


P = with_null_page(some_state(2, 4, 0), 0).free_pages.shape[0]
WRONG = {
    "null_page": ({"null_page": P}, f"null_page must be -1 or a page, an int below P={P}, got int {P}"),
    "null_page_below": ({"null_page": -2}, "null_page must be -1 or a page, .*got int -2"),
    "null_page_bool": ({"null_page": False}, "null_page must be .*got bool False"),
    "null_page_none": ({"null_page": None}, "null_page must be .*got NoneType None"),
    "slots_dtype": ({"slots": torch.zeros(2)}, r"slots must be int32 or int64 \[B\], .*got float32"),
    "slots_rank": ({"slots": ints([[0, 1]])}, r"slots must be int32 or int64 \[B\], .*got int32 \[1, 2\]"),
    "slots_strided": ({"slots": torch.zeros(4).long()[::2]}, "slots must be contiguous, got stride 2"),
    "slots_device": ({"slots": ints([0, 1]).to("meta")}, "slots must be .*on cpu, got .*on meta"),
    "seq_lens": ({"seq_lens": ints([1, 2])}, r"seq_lens must be int32 \[R=5\].*got int32 \[2\]"),
    "no_rows": (
        {"block_table": torch.zeros(0, 3).int(), "seq_lens": ints([])},
        r"block_table must be of at least one row where there are slots, got int32 \[0, 3\]",
    ),
}


@pytest.mark.parametrize("op", ["kv_rollback", "kv_evict", "kv_append_slots"])
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, op, native):
    changes, message = WRONG[name]
    state = at_slots(with_null_page(some_state(2, 4, 0), 0))
    more = {"kv_rollback": "num_rejected", "kv_append_slots": "num_new"}
    given = {more[op]: ints([1, 1])} if op in more else {"keep_last": 1}
    good = {**state.tensors(), "page_size": 4, "null_page": 0, **given}
    good |= {"max_new": 2} if op == "kv_append_slots" else {}
    run = getattr(sk, op)
    run(**good)
    tensors = [t for t in (*good.values(), *changes.values()) if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        run(**{**good, **changes})
    assert_same_bits(tensors, before)


@pytest.mark.parametrize("size", ["num_rejected", "num_new", "out"])
def test_sizes_are_the_batch(size, native):
    """With slots what the caller gives and gets has an element for each slot, not for each row."""
    state = at_slots(make_state([9, 3], 4, 5), skips=False)
    message = size + r" must be int32 \[(B=)?2\].*got int32 \[5\]"
    with pytest.raises(ValueError, match=message):
        if size == "num_new":
            state.append([1] * 5, 2, native)
        else:
            options = {"out": ints([0] * 5)} if size == "out" else {}
            state.rollback([1] * (2 if size == "out" else 5), native, **options)


def test_compact_errors(native):
    cache, path = torch.zeros(3, 4, 1), ints([[1]])
    for options, message in (
        ({"null_page": 0}, "null_page must be -1 without a block_table, got int 0"),
        (
            {"null_page": 3, "block_table": ints([[0]])},
            "null_page must be -1 or a page, an int below pages=3, got int 3",
        ),
        ({"null_page": True, "block_table": ints([[0]])}, "null_page must be .*got bool True"),
    ):
        with pytest.raises(ValueError, match="^kv_compact: " + message):
            sk.kv_compact([cache], path, torch.tensor([0]), backend=native, **options)
