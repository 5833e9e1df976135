"""`kv_rollback`: parity with the oracle, and by hand the faults that rollbacks of paged caches have had."""

import pytest
import torch
import torch._dynamo.testing

import specdec_kernels as sk
from specdec_kernels import CacheStatus
from tests.cases import assert_same_bits, generator
from tests.conftest import available, poison
from tests.interpreter import watching
from tests.kv_states import State, assert_rollback_as_oracle, damage, ints, make_state


def random_lengths(B: int, page_size: int, seed: int) -> list[int]:
    return torch.randint(5 * page_size, (B,), generator=generator("lengths", B, page_size, seed)).tolist()


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 2, 7, 40, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_parity(page_size, B, counts, backend):
    """As the oracle: drafts of 0 to 16 tokens, several pages at once, shared pages, damaged states, lists without room."""
    for seed in range(3 if B < 256 else 1):
        g = generator("rejected", B, page_size, seed)
        M = 9
        state = make_state(
            random_lengths(B, page_size, seed), page_size, M, spare=(0, 5, 40)[seed], share=0.5 * counts, counts=counts,
            seed=seed,
        )  # fmt: skip
        drafts = torch.randint(17, (B,), generator=g, dtype=torch.int32)
        several = torch.randint(-2, 7 * page_size, (B,), generator=g, dtype=torch.int32)
        everything = torch.where(torch.rand(B, generator=g) < 0.5, state.seq_lens, 0)
        for rejected in (drafts, several, everything):
            assert assert_rollback_as_oracle(state.copy(), rejected, backend, seed) == [0] * B
            assert_rollback_as_oracle(damage(state, seed), rejected, backend, f"damaged {seed}")
            full = state.copy()
            full.num_free.fill_(full.free_pages.shape[0] - 1)
            assert_rollback_as_oracle(full, rejected, backend, f"full {seed}")


def test_rollback_across_pages(backend):
    """From 70 tokens to 17, over three page boundaries: each page that is wholly past the end goes back once, last one first."""
    state = State(ints([70]), ints([[4, 9, 2, 7, 5, -1]]), ints([1, *[-7] * 11]), ints([1]), 16)
    for rejected, length, table, free in (
        (5, 65, [4, 9, 2, 7, 5, -1], [1]),
        (1, 64, [4, 9, 2, 7, -1, -1], [1, 5]),
        (16, 48, [4, 9, 2, -1, -1, -1], [1, 5, 7]),
        (31, 17, [4, 9, -1, -1, -1, -1], [1, 5, 7, 2]),
        (17, 0, [-1] * 6, [1, 5, 7, 2, 9, 4]),
        (1, 0, [-1] * 6, [1, 5, 7, 2, 9, 4]),
    ):
        assert state.rollback([rejected], backend) == [0]
        assert state.seq_lens.tolist() == [length]
        assert state.block_table.tolist() == [table]
        assert state.free() == free


def test_pages_come_back_in_their_order(backend):
    """What a rollback pushed is popped in the order in which the request had it."""
    state = State(ints([60]), ints([[4, 9, 2, 7]]), ints([1, *[-7] * 11]), ints([1]), 16)
    state.rollback([50], backend)
    state.append([50], 50, backend)
    assert state.block_table.tolist() == [[4, 9, 2, 7]] and state.free() == [1]


def test_ragged_rollback(backend):
    """Each request by its own number."""
    state = State(
        ints([8, 9, 5, 12]), ints([[0, 1, -1], [2, 3, 4], [5, 6, -1], [7, 8, 9]]), ints([-7] * 10), ints([0]), 4
    )  # fmt: skip
    assert state.rollback([4, 0, 3, 9], backend) == [0] * 4
    assert state.seq_lens.tolist() == [4, 9, 2, 3]
    assert state.block_table.tolist() == [[0, -1, -1], [2, 3, 4], [5, -1, -1], [7, -1, -1]]
    assert state.free() == [1, 6, 9, 8]


def test_reserved_blocks_stay(backend):
    """Pages past the old length were reserved for what comes: they are not the rejected tokens'."""
    state = State(ints([9]), ints([[4, 9, 2, 7, -1]]), ints([-7] * 12), ints([0]), 4)
    state.rollback([5], backend)
    assert state.block_table.tolist() == [[4, -1, -1, 7, -1]] and state.free() == [2, 9]


def test_nothing_rejected_is_untouched(backend):
    """Whatever the table, the counts and the length of such a request hold: a padding row of a batch."""
    junk = ints([[2**31 - 1, -9, 3, 3], [0, 1, -1, -1]])
    state = State(ints([-5, 7]), junk, ints([-7] * 4), ints([0]), 4, ints([1, 1, 0, -3]))
    before = state.copy()
    assert state.rollback([0, 0], backend) == [0, 0]
    assert_same_bits(list(state.tensors().values()), list(before.tensors().values()))
    assert state.rollback([99, 0], backend) == [0, 0]  # a length below 0 has nothing to reject
    assert_same_bits(list(state.tensors().values()), list(before.tensors().values()))


def test_shared_page_is_not_freed(backend):
    """A page that somebody else holds stays; released by its last holders in one batch it goes back once, where the last of
    them comes."""
    table = [[3, 5, 8], [3, 5, 9], [3, 6, 10]]
    state = State(
        ints([12] * 3), ints(table), ints([-7] * 12), ints([0]), 4, ints([0, 0, 0, 3, 0, 2, 1, 0, 1, 1, 1, 0])
    )
    assert state.copy().rollback([8, 0, 0], backend) == [0] * 3
    one = state.copy()
    one.rollback([8, 0, 0], backend)
    assert one.free() == [8] and one.ref_counts[[3, 5, 8]].tolist() == [3, 1, 0]
    both = state.copy()
    both.rollback([8, 8, 0], backend)
    assert both.free() == [8, 9, 5] and both.ref_counts[[3, 5]].tolist() == [3, 0]
    everything = state.copy()
    everything.rollback([12] * 3, backend)
    assert everything.free() == [8, 9, 5, 10, 6, 3] and everything.ref_counts.tolist() == [0] * 12


def test_counts_that_are_too_small(backend):
    """Three releases of a page that counts two: the second one pushes it, the third is reported. A count of 0 pushes nothing."""
    state = State(ints([8] * 4), ints([[0, 5]] * 3 + [[1, 2]]), ints([-7] * 6), ints([0]), 4, ints([3, 1, -4, 0, 0, 2]))
    assert state.rollback([4] * 4, backend) == [0, 0, CacheStatus.BAD_REF_COUNT, CacheStatus.BAD_REF_COUNT]
    assert state.free() == [5] and state.ref_counts.tolist() == [3, 1, -4, 0, 0, 0]
    assert state.block_table.tolist() == [[0, -1]] * 3 + [[1, -1]]


def test_count_at_the_end_of_its_range(backend):
    """It does not wrap to a large one."""
    state = State(ints([8]), ints([[0, 1]]), ints([-7] * 2), ints([0]), 4, ints([1, -(2**31)]))
    assert_rollback_as_oracle(state, [8], backend)
    assert state.ref_counts.tolist() == [0, -(2**31)] and state.free() == [0]


def test_entries_that_are_no_pages(backend):
    """Nothing is released through them and nothing is read or written elsewhere; the rest of the request is."""
    table = [[0, -1, 2], [3, 4, 6], [1, 5, -2147483648], [7, 2147483647, 8]]
    state = State(ints([12] * 4), ints(table), ints([-7] * 6), ints([0]), 4, ints([1] * 6))
    bad = CacheStatus.BAD_PAGE
    assert state.rollback([8, 4, 8, 12], backend) == [bad] * 4
    assert state.free() == [2, 5]
    assert state.block_table.tolist() == [[0, -1, -1], [3, 4, -1], [1, -1, -1], [-1, -1, -1]]
    longer = State(ints([2**31 - 1, 14]), ints([[0, 1]] * 2), ints([-7] * 3), ints([0]), 4)
    assert longer.rollback([2**31 - 1, 9], backend) == [bad, bad]  # blocks past the table
    assert longer.seq_lens.tolist() == [0, 5] and longer.free() == [1, 0] and longer.block_table.tolist()[1] == [0, 1]


def test_free_list_is_full(backend):
    """It never grows past P: what does not fit is reported by its request."""
    state = State(ints([8, 4, 8]), ints([[0, 1], [2, 3], [4, 5]]), ints([9] * 6), ints([4]), 4)
    full = CacheStatus.FREE_LIST_FULL
    assert state.rollback([8, 0, 8], backend) == [0, 0, full]
    assert state.free() == [9, 9, 9, 9, 1, 0] and state.num_free.tolist() == [6]
    state = State(ints([4]), ints([[2]]), ints([9] * 3), ints([77]), 4)
    assert state.rollback([4], backend) == [full] and state.num_free.tolist() == [3]


def test_frees_a_long_request(backend):
    """Thousands of pages of one request, and more requests than one look takes."""
    state = make_state([3000], 1, 3000, counts=True, seed=1)
    assert assert_rollback_as_oracle(state, [2990], backend) == [0]
    state = make_state([3] * 700, 2, 2, share=0.3, seed=2)
    assert assert_rollback_as_oracle(state, [2, 0, 3, 1] * 175, backend) == [0] * 700


def test_rows_of_a_larger_table(backend):
    """Columns past the view and rows between are not touched."""
    whole = torch.full((6, 10), 12345, dtype=torch.int32)
    state = make_state([30, 17, 40], 8, 6, share=0.5)
    view = whole[::2, 2:8]
    view.copy_(state.block_table)
    state = state.copy()
    state.block_table = view
    assert_rollback_as_oracle(state, [20, 3, 31], backend)
    assert (whole[1::2] == 12345).all() and (whole[:, :2] == 12345).all() and (whole[:, 8:] == 12345).all()


def test_outputs_are_written_whole(poisoned_memory, backend):
    state = make_state([20, 3, 0], 4, 6)
    assert assert_rollback_as_oracle(state.copy(), [9, 0, 0], backend) == [0, 0, 0]
    out = torch.full((3,), 12345, dtype=torch.int32)
    assert assert_rollback_as_oracle(state, [9, 0, 0], backend, out=out) == [0, 0, 0] and out.tolist() == [0, 0, 0]


def test_empty_batch(backend):
    state = State(ints([]), torch.zeros(0, 3, dtype=torch.int32), ints([0, 1]), ints([2]), 4)
    assert state.rollback([], backend) == [] and state.free() == [0, 1]


def test_time_does_not_depend_on_the_cache():
    """Bytes read of the free list and of the counts: those of the pages released."""
    available("triton")
    state = make_state([64] * 8, 16, 4, spare=500)
    with watching(state.free_pages, state.ref_counts) as watch:
        state.rollback([20] * 8, "triton")
    assert watch.launches == ["kv_rollback_kernel"]
    assert watch.reads(0).sum() == 0 and watch.reads(1).sum() <= 4 * 8 * 2


def compiled_step(seq_lens, rejected, table, free_pages, num_free, refs, backend):
    status = sk.kv_rollback(seq_lens, rejected, table, free_pages, num_free, 4, ref_counts=refs, backend=backend)
    return status + 1, seq_lens * 2, table + 0, num_free + 0


def test_compiles_whole_with_dynamic_batches(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for B in (4, 7, 5):
        state = make_state(random_lengths(B, 4, 0), 4, 6, share=0.3)
        states = [list(state.copy().tensors().values()) for _ in range(2)]
        got, want = (
            run(s[0], ints([3] * B), *s[1:], backend) for run, s in zip((fn, compiled_step), states, strict=True)
        )
        assert_same_bits(list(got), list(want))
        assert_same_bits(*states)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        i32 = lambda *shape: torch.empty(shape, dtype=torch.int32)  # noqa: E731
        status = sk.kv_rollback(i32(4), i32(4), i32(4, 7), i32(20), i32(1), 16, ref_counts=i32(20), backend=backend)
        assert status.shape == (4,) and status.dtype == torch.int32


def good() -> dict:
    state = make_state([5, 3], 4, 3)
    return {**state.tensors(), "page_size": 4, "num_rejected": ints([1, 0]), "out": ints([0, 0])}


WRONG = {
    "seq_lens": (ints([1]), r"seq_lens must be int32 \[B=2\].*got int32 \[1\]"),
    "seq_lens_dtype": (torch.zeros(2, dtype=torch.int64), "seq_lens must be int32 .*got int64"),
    "num_rejected": (torch.zeros(2), "num_rejected must be int32 .*got float32"),
    "block_table": (ints([1, 2]), r"block_table must be int32 \[B, M\], got int32 \[2\]"),
    "block_table_dtype": (torch.zeros(2, 3), r"block_table must be int32 \[B, M\], got float32"),
    "block_table_columns": (torch.zeros(2, 0, dtype=torch.int32), "block_table must be of at least one column"),
    "block_table_strides": (torch.zeros(3, 2, dtype=torch.int32).T, "block_table must be contiguous in its last"),
    "block_table_rows": (torch.zeros(3, dtype=torch.int32).expand(2, 3), "block_table must be .*rows apart"),
    "free_pages": (ints([]), r"free_pages must be int32 \[P>=1\].*got int32 \[0\]"),
    "free_pages_device": (torch.zeros(9, dtype=torch.int32, device="meta"), "free_pages must be .*on cpu, got .*on meta"),
    "num_free": (ints([1, 2]), r"num_free must be int32 .*got int32 \[2\]"),
    "ref_counts": (ints([1]), r"ref_counts must be int32 \[P=11\].*got int32 \[1\]"),
    "page_size": (0, r"page_size must be an int in 1..2147483647, got int 0"),
    "page_size_bool": (True, "page_size must be an int .*got bool True"),
    "page_size_float": (4.0, "page_size must be an int .*got float 4.0"),
    "out": (ints([1]), r"out must be int32 \[2\] on cpu, got int32 \[1\]"),
    "backend": ("tpu", "backend must be one of .*got 'tpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    value, message = WRONG[name]
    argument = next(a for a in (*good(), "backend") if name.startswith(a))
    call = {"backend": backend, **good()}
    sk.kv_rollback(**call)
    call = {"backend": backend, **good(), argument: value}
    poison(call["out"])
    tensors = [t for t in call.values() if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match="^kv_rollback: " + message):
        sk.kv_rollback(**call)
    assert_same_bits(tensors, before)
