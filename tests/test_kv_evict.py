"""`kv_evict`: parity with the oracle, and by hand what leaves a window, what sinks keep, and what damaged tables do."""

import pytest
import torch
import torch._dynamo.testing

import specdec_kernels as sk
from specdec_kernels import CacheStatus
from tests.cases import assert_same_bits, generator
from tests.conftest import available, poison
from tests.interpreter import watching
from tests.kv_states import State, assert_evict_as_oracle, damage, ints, make_state

BAD = CacheStatus.BAD_PAGE


def random_state(B: int, page_size: int, seed: int, **options) -> State:
    lengths = torch.randint(6 * page_size, (B,), generator=generator("lengths", B, page_size, seed)).tolist()
    return make_state(lengths, page_size, 8, seed=seed, **options)


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 7, 40, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_parity(page_size, B, counts, backend):
    """As the oracle: one page a call and several, sinks, shared pages, damaged states, a list without room. Each state is
    evicted from twice, so that the second call finds entries of -1."""
    for seed in range(2 if B < 40 else 1):
        state = random_state(B, page_size, seed, share=0.5 * counts, counts=counts)
        for keep_last, less, sinks in ((3 * page_size, 1, 0), (4 * page_size + 1, page_size + 2, page_size // 2 + 1)):
            sound, damaged, full = state.copy(), damage(state, seed), state.copy()
            full.num_free.fill_(full.free_pages.shape[0] - 1)
            for last in (keep_last, less):
                what = (seed, keep_last, last)
                assert assert_evict_as_oracle(sound, last, backend, what, sinks=sinks) == [0] * B
                if B < 256 or backend != "triton" or sinks == 0:
                    assert_evict_as_oracle(damaged, last, backend, (*what, "damaged"), sinks=sinks)
                if B < 256 or backend != "triton":
                    assert_evict_as_oracle(full, last, backend, (*what, "full"), sinks=sinks)


def test_what_leaves_the_window(backend):
    """Pages of four: a block goes once all its tokens do, last one first, and lengths stay."""
    state = State(ints([14]), ints([[4, 9, 2, 7, -1]]), ints([1, *[-7] * 11]), ints([1]), 4)
    for length, keep_last, table, free in (
        (14, 14, [4, 9, 2, 7, -1], [1]),
        (14, 11, [4, 9, 2, 7, -1], [1]),  # one token of the first block stays
        (15, 11, [-1, 9, 2, 7, -1], [1, 4]),
        (16, 11, [-1, 9, 2, 7, -1], [1, 4]),
        (16, 4, [-1, -1, -1, 7, -1], [1, 4, 2, 9]),
        (16, 1, [-1, -1, -1, 7, -1], [1, 4, 2, 9]),  # the last token's block stays, though it is full
    ):
        state.seq_lens.fill_(length)
        assert state.evict(keep_last, backend) == [0]
        assert state.seq_lens.tolist() == [length]
        assert state.block_table.tolist() == [table]
        assert state.free() == free


def test_sinks_stay(backend):
    """The block of the last sink stays whole, with the other tokens that it holds."""
    table, everything = [[4, 9, 2, 7, 0]], [4, 9, 2, 7, 0]
    for sinks, left in (
        (0, [-1, -1, -1, -1, 0]),
        (1, [4, -1, -1, -1, 0]),
        (4, [4, -1, -1, -1, 0]),
        (5, [4, 9, -1, -1, 0]),
        (16, everything),
        (21, everything),
        (2**31 - 1, everything),
    ):
        state = State(ints([18]), ints(table), ints([-7] * 12), ints([0]), 4)
        assert state.evict(1, backend, sinks=sinks) == [0]
        assert state.block_table.tolist() == [left], sinks
        assert state.free() == [page for page in reversed(everything) if page not in left]


def test_stops_at_what_was_evicted(backend):
    """From the last old block back to the first entry of -1; what stands before it is not looked at. An entry that is no page
    otherwise is reported and passed."""
    state = State(ints([24]), ints([[5, 8, -1, 3, 99, 2, 6]]), ints([-7] * 12), ints([0]), 4)
    assert state.evict(4, backend) == [BAD]
    assert state.block_table.tolist() == [[5, 8, -1, -1, -1, 2, 6]] and state.free() == [3]
    before = state.copy()
    assert state.evict(4, backend) == [0]
    assert_same_bits(list(state.tensors().values()), list(before.tensors().values()))


def test_shared_page_is_not_freed(backend):
    """A page that somebody else holds stays; released by its last holders in one call it goes back once, where the last of
    them comes."""
    table, counts = [[3, 5, 8], [3, 5, 9], [3, 6, 10]], [0, 0, 0, 3, 0, 2, 1, 0, 1, 1, 1, 0]
    state = State(ints([12, 12, 4]), ints(table), ints([-7] * 12), ints([0]), 4, ints(counts))
    assert state.evict(4, backend) == [0] * 3
    assert state.free() == [5] and state.ref_counts[[3, 5, 8]].tolist() == [1, 0, 1]
    assert state.block_table.tolist() == [[-1, -1, 8], [-1, -1, 9], [3, 6, 10]]
    state.seq_lens.fill_(12)
    assert state.evict(4, backend) == [0] * 3
    assert state.free() == [5, 6, 3] and state.ref_counts[[3, 6]].tolist() == [0, 0]


def test_counts_that_are_too_small(backend):
    """Three releases of a page that counts two: the second one pushes it, the third is reported."""
    state = State(ints([8] * 4), ints([[5, 0]] * 3 + [[2, 1]]), ints([-7] * 6), ints([0]), 4, ints([3, 1, -4, 0, 0, 2]))
    few = CacheStatus.BAD_REF_COUNT
    assert state.evict(1, backend) == [0, 0, few, few]
    assert state.free() == [5] and state.ref_counts.tolist() == [3, 1, -4, 0, 0, 0]
    assert state.block_table.tolist() == [[-1, 0]] * 3 + [[-1, 1]]


def test_free_list_is_full(backend):
    state = State(ints([9, 5, 9]), ints([[0, 1, 6], [2, 3, -1], [4, 5, 7]]), ints([9] * 8), ints([6]), 4)
    full = CacheStatus.FREE_LIST_FULL
    assert state.evict(1, backend) == [0, full, full]
    assert state.free() == [9] * 6 + [1, 0] and state.block_table.tolist() == [[-1, -1, 6], [-1, 3, -1], [-1, -1, 7]]
    state = State(ints([5]), ints([[2, 1]]), ints([9] * 3), ints([-5]), 4)
    assert state.evict(1, backend) == [0] and state.free() == [2]  # num_free is clamped


def test_lengths_past_the_table(backend):
    """A length that the table has no blocks for is reported; one below 0 has nothing to evict."""
    table = [[0, 1], [2, 3], [4, 5], [-1, -1]]
    state = State(ints([2**31 - 1, -3, 12, 12]), ints(table), ints([-7] * 6), ints([0]), 4)
    assert assert_evict_as_oracle(state, 1, backend) == [BAD, 0, 0, 0]
    assert state.block_table.tolist() == [[-1, -1], [2, 3], [-1, -1], [-1, -1]] and state.free() == [1, 0, 5, 4]
    assert state.evict(2**31 - 1, backend) == [0] * 4
    assert assert_evict_as_oracle(state, 1, backend, sinks=2**31 - 1) == [0] * 4  # the sinks' blocks are not asked for


def test_first_call_of_a_long_request(backend):
    """Thousands of pages of one request, and more requests than one look takes."""
    state = make_state([3000], 1, 3000, counts=True, seed=1)
    assert assert_evict_as_oracle(state, 5, backend, sinks=3) == [0]
    assert len(state.free()) == 8 + 2992
    state = make_state([400, 0, 129, 300, 128], 1, 400, share=0.3, seed=1)
    assert assert_evict_as_oracle(state, 1, backend, sinks=2) == [0] * 5
    state = make_state([7] * 700, 2, 4, share=0.3, seed=2)
    assert assert_evict_as_oracle(state, 2, backend) == [0] * 700


def test_rows_of_a_larger_table(backend):
    """Columns past the view and rows between are not touched."""
    whole = torch.full((6, 10), 12345, dtype=torch.int32)
    state = make_state([30, 17, 40], 8, 6, share=0.5)
    view = whole[::2, 2:8]
    view.copy_(state.block_table)
    state = state.copy()
    state.block_table = view
    assert_evict_as_oracle(state, 9, backend)
    assert (whole[1::2] == 12345).all() and (whole[:, :2] == 12345).all() and (whole[:, 8:] == 12345).all()


def test_outputs_are_written_whole(poisoned_memory, backend):
    state = make_state([20, 3, 0], 4, 6)
    assert assert_evict_as_oracle(state.copy(), 9, backend) == [0, 0, 0]
    out = torch.full((3,), 12345, dtype=torch.int32)
    assert assert_evict_as_oracle(state, 9, backend, out=out) == [0, 0, 0] and out.tolist() == [0, 0, 0]


def test_empty_batch(backend):
    state = State(ints([]), torch.zeros(0, 3, dtype=torch.int32), ints([0, 1]), ints([2]), 4)
    assert state.evict(3, backend) == [] and state.free() == [0, 1]


@pytest.mark.parametrize("B, columns", [(1, 1024), (3, 128), (9, 16)])
def test_time_does_not_depend_on_the_length(B, columns):
    """Entries read of the table, free list and counts: one look and a few for each page evicted, however long the text is. The
    fewer requests there are, the more entries of each are looked at together."""
    available("triton")
    state = make_state([4000] * B, 2, 2000, spare=500)
    state.evict(40, "triton")
    state.seq_lens += 2
    state.block_table[:, :1900] = 77  # never looked at, or it would be released
    state.block_table[:, 1900:1980] = -1
    with watching(state.block_table, state.free_pages, state.ref_counts) as watch:
        assert state.evict(40, "triton") == [0] * B
    assert watch.launches == ["kv_evict_kernel"]
    assert (state.block_table[:, :1900] == 77).all() and (state.block_table[:, 1980] == -1).all()
    assert B * columns <= watch.reads(0).sum() <= B * (columns + 4)
    assert watch.reads(1).sum() == 0 and watch.reads(2).sum() <= B * 4


def compiled_step(seq_lens, table, free_pages, num_free, refs, backend):
    status = sk.kv_evict(seq_lens, 5, table, free_pages, num_free, 4, sinks=2, ref_counts=refs, backend=backend)
    return status + 1, seq_lens * 2, table + 0, num_free + 0


def test_compiles_whole_with_dynamic_batches(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for B in (4, 7, 5):
        state = random_state(B, 4, 0, share=0.3)
        states = [list(state.copy().tensors().values()) for _ in range(2)]
        got, want = (run(*s, backend) for run, s in zip((fn, compiled_step), states, strict=True))
        assert_same_bits(list(got), list(want))
        assert_same_bits(*states)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        i32 = lambda *shape: torch.empty(shape, dtype=torch.int32)  # noqa: E731
        status = sk.kv_evict(i32(4), 9, i32(4, 7), i32(20), i32(1), 16, ref_counts=i32(20), backend=backend)
        assert status.shape == (4,) and status.dtype == torch.int32


def good() -> dict:
    state = make_state([9, 3], 4, 3)
    return {**state.tensors(), "page_size": 4, "keep_last": 3, "sinks": 1, "out": ints([0, 0])}


WRONG = {
    "seq_lens": (ints([1]), r"seq_lens must be int32 \[B=2\].*got int32 \[1\]"),
    "block_table": (ints([1, 2]), r"block_table must be int32 \[B, M\], got int32 \[2\]"),
    "block_table_columns": (torch.zeros(2, 0, dtype=torch.int32), "block_table must be of at least one column"),
    "free_pages": (ints([]), r"free_pages must be int32 \[P>=1\].*got int32 \[0\]"),
    "num_free": (ints([1, 2]), r"num_free must be int32 .*got int32 \[2\]"),
    "ref_counts": (ints([1]), r"ref_counts must be int32 \[P=12\].*got int32 \[1\]"),
    "page_size": (0, r"page_size must be an int in 1..2147483647, got int 0"),
    "keep_last": (0, r"keep_last must be an int in 1..2147483647, got int 0"),
    "keep_last_bool": (True, "keep_last must be an int .*got bool True"),
    "keep_last_tensor": (ints([4, 4]), r"keep_last must be an int .*got int32 \[2\]"),
    "keep_last_large": (2**31, "keep_last must be an int .*got int 2147483648"),
    "sinks": (-1, r"sinks must be an int in 0..2147483647, got int -1"),
    "sinks_float": (4.0, "sinks must be an int .*got float 4.0"),
    "out": (ints([1]), r"out must be int32 \[2\] on cpu, got int32 \[1\]"),
    "backend": ("tpu", "backend must be one of .*got 'tpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    value, message = WRONG[name]
    argument = next(a for a in (*good(), "backend") if name.startswith(a))
    sk.kv_evict(**good(), backend=backend)
    call = {"backend": backend, **good(), argument: value}
    poison(call["out"])
    tensors = [t for t in call.values() if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match="^kv_evict: " + message):
        sk.kv_evict(**call)
    assert_same_bits(tensors, before)


def test_scrubbed_pages(backend):
    """What an eviction pushes becomes zero; a page that somebody else holds stays, and so does all that was not evicted."""
    state = State(
        ints([15, 9]),
        ints([[0, 1, 2, 3], [0, 4, 5, -1]]),
        ints([7, *[-7] * 7]),
        ints([1]),
        4,
        ints([2, 2, *[1] * 4, 0, 0]),
    )
    caches = [torch.rand(8, 4, 2, 3) + 1, torch.rand(9, 4, 5).bfloat16() + 1]
    before = [t.clone() for t in caches]
    assert state.evict(5, backend, scrub=caches) == [0, 0]
    assert state.free() == [7, 0]
    for cache, old in zip(caches, before, strict=True):
        assert not cache[0].any()
        assert torch.equal(cache[1:], old[1:])
    with pytest.raises(ValueError, match=r"kv_evict: scrub\[0\] must be of page_size=4 tokens a page"):
        state.evict(5, backend, scrub=[torch.zeros(8, 2, 1)])
