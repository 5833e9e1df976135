"""`kv_scrub`, by `kv_rollback(scrub=)`: parity on every layout, what stays, and that no tenant sees another's bits."""

import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from specdec_kernels import _backends
from specdec_kernels.kv_scrub import kv_scrub
from tests.cache_cases import DTYPES, LAYOUTS, PageCase, assert_bits, bits, page_case, random_bits, written
from tests.cases import assert_same_bits, generator, ids
from tests.conftest import available
from tests.interpreter import watching
from tests.kv_states import State, assert_rollback_as_oracle, damage, ints, make_state

pytestmark = pytest.mark.usefixtures("one_thread")

PAGED = [name for name, layout in LAYOUTS.items() if layout.paged]


def some_state(page_size: int, B=5, counts=True, seed=0) -> tuple[State, torch.Tensor]:
    """Requests of up to five pages, and what each rejects: nothing, a few tokens, pages, all."""
    g = generator("scrub", page_size, B, counts, seed)
    lengths = torch.randint(5 * page_size + 1, (B,), generator=g)
    state = make_state(lengths.tolist(), page_size, 6, spare=3, share=0.4 * counts, counts=counts, seed=seed)
    few, several = torch.randint(6, (B,), generator=g), torch.randint(-2, 3 * page_size + 1, (B,), generator=g)
    kind = torch.rand(B, generator=g)
    rejected = torch.where(kind < 0.2, 0, torch.where(kind < 0.6, few, torch.where(kind < 0.9, several, lengths)))
    return state, rejected.int()


def pages_of(state: State) -> int:
    return state.free_pages.shape[0]


def assert_scrubbed(state: State, rejected, case: PageCase, backend: str, what="") -> int:
    """Bookkeeping and whole buffers as the oracles leave them; returns how many elements changed."""
    rejected = ints(rejected)
    lists = state.lists()
    before = list(lists["num_free"])
    python_ref.kv_rollback(num_rejected=rejected.tolist(), **lists)
    del lists["page_size"]
    values = python_ref.kv_scrub(case.views(case.buffers), before=before, num_rejected=rejected.tolist(), **lists)
    want, got = written(case.buffers, case.views, values), case.copies()
    assert_rollback_as_oracle(state, rejected, backend, what, scrub=case.views(got))
    assert_bits(got, want, what)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(case.buffers, want, strict=True))


def zeroed(who: str, state: State, rejected) -> dict[int, list[int]]:
    """Slots of each page that are zero after a rollback of `state`, in a cache that held none; "oracle" is the oracle."""
    P, page_size = pages_of(state), state.page_size
    cache = torch.ones(P, page_size, 1)
    if who == "oracle":
        lists = state.lists()
        before = list(lists["num_free"])
        python_ref.kv_rollback(num_rejected=rejected, **lists)
        del lists["page_size"]
        (cache,) = python_ref.kv_scrub([cache], before=before, num_rejected=rejected, **lists)
    else:
        state.rollback(rejected, who, scrub=[cache])
    slots = [(cache[page, :, 0] == 0).nonzero().flatten().tolist() for page in range(P)]
    return {page: found for page, found in enumerate(slots) if found}


@pytest.fixture(params=["oracle", "native", "eager", "triton"])
def who(request):
    return request.param if request.param == "oracle" else available(request.param)


# --- by hand ------------------------------------------------------------------------------------------------------------


def test_pages_and_the_rest_of_the_last_one(who):
    """From 15 tokens to 6 in pages of four: two pages go back, two slots of the third are let go of. Free pages stay as they
    are, and so does a block that was reserved past the old length."""
    state = State(ints([15]), ints([[5, 2, 7, 0, 6]]), ints([3, *[-7] * 7]), ints([1]), 4)
    assert zeroed(who, state.copy(), [9]) == {7: [0, 1, 2, 3], 0: [0, 1, 2, 3], 2: [2, 3]}
    assert zeroed(who, state.copy(), [1]) == {0: [2, 3]}
    assert zeroed(who, state.copy(), [3]) == {0: [0, 1, 2, 3]}  # 12 tokens: to the end of a page
    assert zeroed(who, state.copy(), [15]) == {page: [0, 1, 2, 3] for page in (5, 2, 7, 0)}
    assert zeroed(who, state.copy(), [0]) == {} and zeroed(who, state.copy(), [-3]) == {}


def test_each_request_by_its_own(who):
    """Those that reject nothing keep what is behind their end."""
    state = State(ints([6, 6, 5]), ints([[0, 1], [2, 3], [4, 5]]), ints([-7] * 6), ints([0]), 4)
    assert zeroed(who, state, [1, 0, 1]) == {1: [1, 2, 3], 5: [0, 1, 2, 3]}


def test_shared_page_is_not_scrubbed(who):
    """Two requests and a prefix cache hold pages together. What one lets go of the others may still read."""
    table, refs = [[0, 1, 2], [0, 1, 3], [0, 4, -1]], ints([3, 2, 1, 1, 2, 0, 0])
    state = State(ints([10, 10, 6]), ints(table), ints([-7] * 7), ints([0]), 4, refs)
    assert zeroed(who, state.copy(), [5, 0, 1]) == {2: [0, 1, 2, 3]}  # pages 1 and 4 count two
    assert zeroed(who, state.copy(), [5, 6, 0]) == {2: [0, 1, 2, 3], 3: [0, 1, 2, 3], 1: [1, 2, 3]}
    assert zeroed(who, state.copy(), [5, 5, 0]) == {2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}  # both end in page 1
    assert zeroed(who, state.copy(), [10, 10, 0]) == {page: [0, 1, 2, 3] for page in (1, 2, 3)}
    assert zeroed(who, state.copy(), [10, 10, 3]) == {**{page: [0, 1, 2, 3] for page in (1, 2, 3)}, 0: [3]}


def test_page_that_was_not_pushed_stays(who):
    """A count that was 0 and a list that is full: the page is nobody's to give, so it is not touched."""
    state = State(ints([8, 8]), ints([[0, 1], [2, 3]]), ints([4, *[-7] * 4]), ints([1]), 4, ints([1, 0, 1, 1, 0]))
    assert zeroed(who, state, [4, 4]) == {3: [0, 1, 2, 3]}
    state = State(ints([8, 8]), ints([[0, 1], [2, 3]]), ints([4] * 5), ints([4]), 4)
    assert zeroed(who, state, [4, 4]) == {1: [0, 1, 2, 3]}


def test_places_that_are_none(who):
    """A last block past the table, without a page, or with what is none, and a length below 0: nothing is written through them,
    and what is in the table's next row is not theirs."""
    state = State(
        ints([15, 7, 6, 6, -6]), ints([[0, 1], [2, 3], [4, -1], [5, 8], [6, 7]]), ints([-7] * 8), ints([0]), 4
    )
    assert zeroed(who, state.copy(), [1, 0, 0, 0, 0]) == {}
    assert zeroed(who, state, [1, 1, 1, 1, 1]) == {3: [2, 3]}


def test_two_requests_that_end_in_one_page(who):
    """Without counts, in a table that is not sound: what either lets go of is zero."""
    state = State(ints([6, 7]), ints([[0, 1], [2, 1]]), ints([-7] * 3), ints([0]), 4)
    assert zeroed(who, state.copy(), [1, 1]) == zeroed(who, state, [1, 0]) == {1: [1, 2, 3]}


# --- parity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("layout", PAGED)
def test_parity(layout, dtype, backend):
    """All bits of every element type become zero, -0.0 and NaN payloads too."""
    changed = 0
    for seed, (page_size, H, D) in enumerate(((16, 4, 24), (5, 3, 7))):
        state, rejected = some_state(page_size, counts=seed == 0, seed=seed)
        case = page_case(layout, pages_of(state), page_size, H, D, dtype, layers=2 - seed, seed=seed)
        changed += assert_scrubbed(state, rejected, case, backend)
    assert changed > 0


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "between"])
def test_page_sizes(layout, page_size, backend):
    state, rejected = some_state(page_size, B=6, seed=4)
    case = page_case(layout, pages_of(state), page_size, H=2, D=16, layers=1)
    assert assert_scrubbed(state, rejected, case, backend) > 0


@pytest.mark.parametrize(("H", "D"), [(1, 576), (1, 128), (2, 80), (8, 128), (32, 64), (5, 7)])
def test_heads(H, D, backend):
    for seed, layout in enumerate(("latents",) if D == 576 else ("nhd", "hnd")):
        state, rejected = some_state(16, B=3, seed=seed + 3)
        case = page_case(layout, pages_of(state), 16, H, D, layers=1, seed=seed)
        assert assert_scrubbed(state, rejected, case, backend) > 0


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 7, 300])
def test_damaged_states(B, counts, backend):
    """Tables, counts and lengths that no sound state has, full lists: pages of the cache are written or nothing, and the same
    on every backend. Caches may have pages that the list does not."""
    for seed in range({"native": 8, "eager": 4, "triton": 1}[backend] if B < 300 else 1):
        state, rejected = some_state(4, B, counts, seed)
        case = page_case(PAGED[seed % len(PAGED)], pages_of(state) + 2, 4, H=2, D=4, layers=1)
        assert_scrubbed(damage(state, seed), rejected, case, backend, f"damaged {seed}")
        for count in (-5, pages_of(state) - 1, 2**31 - 1) if B < 300 else ():
            state.num_free.fill_(count)
            assert_scrubbed(state.copy(), rejected, case, backend, f"count {count}")


def test_list_that_is_not_sound(backend):
    """The op itself: entries that are no pages, pages twice, counts past the list's ends; no request is given."""
    P = 6
    free_pages, case = ints([3, -1, 5, P, 2**31 - 1, -(2**31)]), page_case("hnd", P + 3, page_size=4, H=2, D=8)
    for before, after in ((0, 6), (1, 3), (2, 2), (5, 1), (-9, 99), (2**31 - 1, -(2**31)), (-1, 1)):
        want = python_ref.kv_scrub(case.views(case.buffers), free_pages.tolist(), [before], [after])
        got = case.copies()
        kv_scrub(
            case.views(got),
            free_pages,
            ints([before]),
            ints([after]),
            backend=_backends.resolve("", backend, torch.device("cpu")),
        )
        assert_bits(got, written(case.buffers, case.views, want), (before, after))
    got = case.copies()
    kv_scrub(case.views(got), ints([3, 3, 3, 5, 5, 0]), ints([1]), ints([5]), backend=backend)
    changed = [
        page
        for page in range(P + 3)
        if not torch.equal(bits(case.views(got)[0])[page], bits(case.views(case.buffers)[0])[page])
    ]
    assert changed == [3, 5]


def test_threads_change_no_bit(native):
    state, rejected = some_state(64, B=12, seed=6)
    case = page_case("hnd", pages_of(state), 64, H=4, D=64, layers=4)
    torch.set_num_threads(4)
    assert assert_scrubbed(state, rejected, case, native) > 4 * 16384 * 4


def test_layers_that_differ(backend):
    """Other heads, latents, scales per token, more pages: each layout in a launch of its own."""
    state, rejected = some_state(16, seed=5)
    P, g = pages_of(state), generator("scrub differ")
    buffers = [
        random_bits((P, 16, 4, 24), torch.bfloat16, g), random_bits((P + 4, 16, 4, 24), torch.bfloat16, g),
        random_bits((P, 16, 36), torch.float8_e4m3fn, g), random_bits((P, 16, 4), torch.float32, g),
    ]  # fmt: skip
    assert assert_scrubbed(state, rejected, PageCase(buffers, list), backend) > 0


def test_many_pages_and_many_requests(backend):
    """More than programs look at together: a long request that is freed, and hundreds that end within a page."""
    state = make_state([400], 1, 400, seed=1)
    case = page_case("nhd", pages_of(state), page_size=1, H=1, D=8, layers=1)
    assert assert_scrubbed(state, [390], case, backend) > 0
    state = make_state([7] * 258, 4, 2, seed=2)
    case = page_case("hnd", pages_of(state), page_size=4, H=2, D=4, layers=1)
    assert assert_scrubbed(state, [0, 1, 0, 0, 0, 2] * 43, case, backend) > 0


def test_row_offset_overflow(backend):
    """Offsets of more than 2^31 elements, in a cache whose memory is mostly never touched."""
    pages, page_size, D = (1 << 19) + 8, 64, 130
    cache = torch.empty(pages, page_size, D, dtype=torch.int8)[..., 1:]
    assert (pages - 8) * page_size * D > 1 << 32
    touched = [pages - 1, pages - 2, pages - 3, 7]
    cache[touched] = 5
    state = State(ints([150]), ints([touched[:3]]), ints([-7] * pages), ints([0]), page_size)
    if backend == "eager":  # it writes a page for each that could have been pushed, here three
        assert state.block_table.numel() == 3
    assert state.rollback([50], backend, scrub=[cache]) == [0]
    assert not cache[pages - 3].any() and not cache[pages - 2, 36:].any()
    assert (cache[pages - 2, :36] == 5).all() and (cache[[pages - 1, 7]] == 5).all()


# --- what it is for -----------------------------------------------------------------------------------------------------


def test_nothing_leaks_to_the_next_tenant(backend):
    """One request's tokens are rejected and its pages pass to another: nothing of them is in what the other can reach, nor
    behind the end of the first."""
    page_size = 4
    state = State(ints([14, 0]), ints([[3, 1, 6, 0, -1], [-1] * 5]), ints([5, *[-7] * 7]), ints([1]), page_size)
    caches = [torch.full((8, page_size, 2, 4), torch.nan), torch.full((8, 2, page_size, 4), 7, dtype=torch.int8)]
    views = [caches[0], caches[1].transpose(1, 2)]
    state.rollback([9, 0], backend, scrub=views)
    out = state.append([0, 9], 9, backend)
    assert state.block_table[1].tolist() == [
        6,
        0,
        5,
        -1,
        -1,
    ]  # two of them were the first one's, the last nobody's before
    for view in views:
        assert not bits(view)[[6, 0]].any() and bits(view)[5].any()
        assert bits(view)[3].all() and bits(view)[1, 0].any() and not bits(view)[1, 1:].any()
    assert out.slots[1].tolist() == [24, 25, 26, 27, 0, 1, 2, 3, 20]


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
def test_no_old_bits_over_many_steps(counts, backend):
    """Random appends, rollbacks, forks and frees in a small cache, with copies on write. Without sharing a slot is other than
    zero exactly where a request has a token; with it, once all have left, the whole cache is zero."""
    page_size, B, M, P = 4, 4, 6, 16
    state = State(
        ints([0] * B),
        ints([[-1] * M] * B),
        ints(list(range(P))),
        ints([P]),
        page_size,
        ints([0] * P) if counts else None,
    )
    caches = [torch.zeros(P, page_size, 2, 3), torch.zeros(P, 2, page_size, 5, dtype=torch.int8).transpose(1, 2)]
    g = generator("old bits", counts)
    for step in range({"native": 300, "eager": 60, "triton": 8}[backend]):
        out = state.append(torch.randint(6, (B,), generator=g).int(), 5, backend)
        sk.kv_copy_pages(caches, out.copy_src, out.copy_dst, backend=backend)
        slots = out.slots[out.slots >= 0]
        for cache in caches:
            cache[slots // page_size, slots % page_size] = 1 + step % 100
        rejected = torch.randint(-3, 6, (B,), generator=g).int()
        leaves = torch.rand(B, generator=g) < 0.1
        state.rollback(torch.where(leaves, state.seq_lens, rejected), backend, scrub=caches)
        if counts and step % 3 == 0:  # the last request's pages are shared with one that has none
            state.rollback(ints([1000, *[0] * (B - 1)]), backend, scrub=caches)
            state.block_table[0], state.seq_lens[0] = state.block_table[-1], state.seq_lens[-1]
            held = state.block_table[-1]
            state.ref_counts[held[held >= 0].long()] += 1
        used = torch.zeros(P, page_size, dtype=torch.bool)
        for b in range(B):
            for position in range(int(state.seq_lens[b])):
                used[state.block_table[b, position // page_size], position % page_size] = True
        for cache in caches:
            there = (cache != 0).flatten(2).any(2)
            assert (there | ~used).all() and (counts or torch.equal(there, used))
            assert not cache[state.free()].any()
    state.rollback(state.seq_lens.clone(), backend, scrub=caches)
    assert sorted(state.free()) == list(range(P)) and not any(cache.any() for cache in caches)


# --- contract -----------------------------------------------------------------------------------------------------------


def test_nothing_to_scrub(backend):
    state, rejected = some_state(4)
    P = pages_of(state)
    case = page_case("nhd", P, page_size=4, H=2, D=4)
    got = case.copies()
    caches = case.views(got)
    plain = state.copy()
    want = plain.rollback(rejected, backend)
    for scrub in ([], (), [t[..., :0] for t in caches], None):
        other = state.copy()
        assert other.rollback(rejected, backend, scrub=scrub) == want
        assert_same_bits(list(other.tensors().values()), list(plain.tensors().values()))
    state.rollback([0] * len(rejected), backend, scrub=caches)
    empty = State(ints([]), torch.zeros(0, 3, dtype=torch.int32), ints([0, 1]), ints([2]), 4)
    assert empty.rollback([], backend, scrub=caches) == []
    assert_bits(got, case.buffers)


def test_time_does_not_depend_on_the_cache():
    """No element of a cache is read; of the free list what was pushed, a time for each piece of a page; of the counts those of
    the pages that requests end in."""
    available("triton")
    state = make_state([64] * 8, 16, 4, spare=500)
    P = pages_of(state)
    caches = [torch.ones(P, 16, 2, 8) for _ in range(8)]
    plain = state.copy()
    with watching(state.free_pages, *caches) as watch:
        state.rollback([20] * 8, "triton", scrub=caches)
    with watching(plain.free_pages) as before:
        plain.rollback([20] * 8, "triton")
    assert watch.launches == ["kv_rollback_kernel", "kv_scrub_kernel"] and before.reads(0).sum() == 0
    assert watch.reads(0).sum() == 8 * 8 and int((watch.reads(0) > 0).sum()) == 8  # eight pages, eight caches
    assert all(watch.reads(i + 1).sum() == 0 for i in range(8))


def compiled_step(caches, seq_lens, rejected, table, free_pages, num_free, refs, backend):
    caches = [t.mul_(2) for t in caches]
    status = sk.kv_rollback(
        seq_lens,
        rejected,
        table,
        free_pages,
        num_free,
        4,
        ref_counts=refs,
        scrub=[t[:, 0] for t in caches],
        backend=backend,
    )
    return status + 1, sum(t.sum() for t in caches), seq_lens * 2, num_free + 0


def test_compiles_whole(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for B in (4, 7, 5):
        state = make_state([9] * B, 4, 6, share=0.3, spare=40 - 3 * B)
        P = pages_of(state)
        plain = [torch.randint(1, 9, (P, 2, 4, 2, 3), generator=generator(B, i)).float() for i in range(2)]
        results = []
        for run in (fn, compiled_step):
            caches, held = [t.clone() for t in plain], list(state.copy().tensors().values())
            results.append([*run(caches, held[0], ints([6] * B), *held[1:], backend), *caches, *held])
        assert_same_bits(*results)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        i32 = lambda *shape: torch.empty(shape, dtype=torch.int32)  # noqa: E731
        caches = [torch.empty(20, 16, 4, 64, dtype=torch.bfloat16) for _ in range(4)]
        status = sk.kv_rollback(i32(4), i32(4), i32(4, 7), i32(20), i32(1), 16, scrub=caches, backend=backend)
        assert status.shape == (4,)


CACHE = torch.zeros(13, 4, 2, 8)
WRONG = {
    "type": (CACHE, r"scrub must be a list or tuple of tensors, got float32 \[13, 4, 2, 8\]"),
    "member": ([CACHE, None], r"scrub\[1\] must be a tensor on cpu .*got NoneType"),
    "size": ([CACHE.double()], r"scrub\[0\] must be .*of 1, 2 or 4 bytes, got float64"),
    "device": ([CACHE.to("meta")], r"scrub\[0\] must be a tensor on cpu.*on meta"),
    "rank": ([CACHE, CACHE[0, 0]], r"scrub\[1\] must be \[pages, page_size, H, D\].*got float32 \[2, 8\]"),
    "columns": ([CACHE.mT], r"scrub\[0\] must be contiguous in its last .*strides \[64, 16, 1, 8\]"),
    "expanded": ([CACHE[:1].expand(13, -1, -1, -1)], r"scrub\[0\] must be .*do not share memory"),
    "page_size": ([CACHE, CACHE.transpose(1, 2)], r"scrub\[1\] must be of page_size=4 tokens .*\[13, 2, 4, 8\]"),
    "pages": ([CACHE, CACHE[:10]], r"scrub\[1\] must be of at least P=11 pages, got float32 \[10, 4, 2, 8\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    scrub, message = WRONG[name]
    state = make_state([5, 3], 4, 3)
    CACHE.copy_(torch.rand(CACHE.shape))
    before, kept = CACHE.clone(), state.copy()
    with pytest.raises(ValueError, match="^kv_rollback: " + message):
        state.rollback([1, 0], backend, scrub=scrub)
    assert_same_bits([*state.tensors().values(), CACHE], [*kept.tensors().values(), before])
    state.rollback([1, 0], backend, scrub=[CACHE])
    assert not torch.equal(CACHE, before)


def test_op_called_directly_stays_inside(native):
    """The compiled op checks what a caller of its own could get wrong."""
    op = _backends.op("kv_scrub", "native")
    count, held = ints([0]), (ints([1]), ints([1]), ints([[0]]))
    with pytest.raises(RuntimeError, match="caches must be of a page for each entry"):
        op([torch.zeros(3, 4, 2)], ints([0] * 4), count, count, *held, None, None, -1)
    with pytest.raises(RuntimeError, match="given with block_table"):
        op([torch.zeros(4, 4, 2)], ints([0] * 4), count, count, None, None, ints([[0]]), None, None, -1)
    with pytest.raises(RuntimeError, match=r"ref_counts must be .*long enough"):
        op([torch.zeros(4, 4, 2)], ints([0] * 4), count, count, *held, ints([0]), None, -1)
