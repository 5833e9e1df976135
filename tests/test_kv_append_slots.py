"""`kv_append_slots`: parity with the oracle, and by hand what shared pages and an empty free list do."""

import pytest
import torch
import torch._dynamo.testing

import specdec_kernels as sk
from specdec_kernels import AppendOutput, CacheStatus
from tests.cases import assert_same_bits, generator
from tests.conftest import available, poison
from tests.interpreter import watching
from tests.kv_states import State, assert_append_as_oracle, damage, ints, make_state

OUT, FULL, BAD = CacheStatus.OUT_OF_PAGES, CacheStatus.TABLE_FULL, CacheStatus.BAD_PAGE


def random_state(B: int, page_size: int, seed: int, **options) -> State:
    lengths = torch.randint(5 * page_size, (B,), generator=generator("lengths", B, page_size, seed)).tolist()
    return make_state(lengths, page_size, 7, seed=seed, **options)


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no_counts"])
@pytest.mark.parametrize("B", [1, 2, 7, 40, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_parity(page_size, B, counts, backend):
    """As the oracle: 0 to 17 tokens, several pages at once, shared pages, damaged states, too few pages, tables too short."""
    for seed in range(3 if B < 40 else 1):
        g = generator("new", B, page_size, seed)
        for spare in (4 * B, B // 3, 0) if B < 256 else (B // 3,):
            state = random_state(B, page_size, seed, spare=spare, share=0.5 * counts, counts=counts)
            drafts = torch.randint(-1, 18, (B,), generator=g, dtype=torch.int32)
            several = torch.randint(3 * page_size + 1, (B,), generator=g, dtype=torch.int32)
            for new, max_new in ((drafts, 17), (several, min(3 * page_size, 200))):
                assert_append_as_oracle(state.copy(), new, max_new, backend, (seed, spare))
                assert_append_as_oracle(damage(state, seed), new, max_new, backend, (seed, spare, "damaged"))


def test_pages_come_from_the_top(backend):
    """Requests ascending, blocks ascending; slots are page * page_size + offset."""
    state = State(
        ints([6, 0, 4]),
        ints([[5, 2, -1, -1], [-1] * 4, [8, -1, -1, -1]]),
        ints([0, 3, 7, 1, 9, *[-7] * 5]),
        ints([5]),
        4,
    )
    got = state.append([3, 5, 0], 6, backend)
    assert got.slots.tolist() == [[10, 11, 36, -1, -1, -1], [4, 5, 6, 7, 28, -1], [-1] * 6]
    assert state.block_table.tolist() == [[5, 2, 9, -1], [1, 7, -1, -1], [8, -1, -1, -1]]
    assert state.seq_lens.tolist() == [9, 5, 4] and state.free() == [0, 3]
    assert state.free_pages.tolist() == [0, 3, 7, 1, 9, *[-7] * 5]
    assert got.copy_src.tolist() == got.copy_dst.tolist() == [-1] * 3


def test_reserved_blocks_are_used(backend):
    state = State(ints([3, 4]), ints([[0, 5, -1], [1, 6, -1]]), ints([2, 3, *[-7] * 5]), ints([2]), 4, ints([1] * 7))
    state.append([6, 4], 6, backend)
    assert state.block_table.tolist() == [[0, 5, 3], [1, 6, -1]] and state.free() == [2]
    assert state.ref_counts.tolist() == [1] * 7


def test_shared_page_is_not_written(backend):
    """Two requests share a full page and a partly filled one: the first to write gets a copy, the second is then alone."""
    table = [[0, 1, -1], [0, 1, -1], [0, 2, -1]]
    state = State(ints([6, 6, 8]), ints(table), ints([5, 4, 3, *[-7] * 3]), ints([3]), 4, ints([3, 2, 1, 0, 0, 0]))
    got = state.append([1, 1, 1], 1, backend)
    assert got.slots.tolist() == [[14], [6], [16]]
    assert got.copy_src.tolist() == [1, -1, -1] and got.copy_dst.tolist() == [3, -1, -1]
    assert state.block_table.tolist() == [[0, 3, -1], [0, 1, -1], [0, 2, 4]]
    assert state.ref_counts.tolist() == [3, 1, 1, 1, 1, 0] and state.free() == [5]


def test_shared_page_that_is_full_stays_shared(backend):
    """At a page's end nothing is written to it: no copy."""
    state = State(ints([4, 4]), ints([[0, -1]] * 2), ints([1, 2, -7]), ints([2]), 4, ints([2, 0, 0]))
    got = state.append([4, 4], 4, backend)
    assert state.block_table.tolist() == [[0, 2], [0, 1]] and got.copy_src.tolist() == [-1, -1]
    assert state.ref_counts.tolist() == [2, 1, 1]


def test_reserved_page_that_is_shared(backend):
    """Forked with its reserve, a request does not write to the other's: it takes a page of its own, without a copy."""
    state = State(ints([4, 4]), ints([[0, 1]] * 2), ints([2, 3, -7, -7]), ints([2]), 4, ints([2, 2, 0, 0]))
    got = state.append([1, 1], 1, backend)
    assert state.block_table.tolist() == [[0, 3], [0, 1]] and got.copy_src.tolist() == [-1, -1]
    assert got.slots.tolist() == [[12], [4]] and state.ref_counts.tolist() == [2, 1, 0, 1]


def test_free_list_runs_dry(backend):
    """All or nothing, in turn: a request that does not fit takes nothing, those behind it that fit are served."""
    for counts in (None, ints([1] * 9)):
        table = [[0, -1, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1], [3, -1, -1, -1]]
        state = State(ints([4, 4, 4, 3]), ints(table), ints([6, 7, 8, *[-7] * 6]), ints([3]), 4, counts)
        got = state.append([5, 8, 1, 1], 8, backend)
        assert got.status.tolist() == [0, OUT, 0, 0]
        assert got.slots[:, :5].tolist() == [[32, 33, 34, 35, 28], [-1] * 5, [24, -1, -1, -1, -1], [15, -1, -1, -1, -1]]
        assert state.seq_lens.tolist() == [9, 4, 5, 4] and state.free() == []
        assert state.block_table.tolist() == [[0, 8, 7, -1], [1, -1, -1, -1], [2, 6, -1, -1], [3, -1, -1, -1]]
        got = state.append([0, 1, 1, 1], 8, backend)  # one more fits where there is room in a page
        assert got.status.tolist() == [0, OUT, 0, OUT] and got.slots[2].tolist() == [25, *[-1] * 7]


def test_no_page_for_the_copy(backend):
    """Copy on write with an empty list: refused, still shared; once the other holder is gone it is served in place."""
    state = State(ints([3, 3]), ints([[0, -1]] * 2), ints([-7] * 2), ints([0]), 4, ints([2, 0]))
    got = state.append([1, 0], 1, backend)
    assert got.status.tolist() == [OUT, 0] and got.copy_src.tolist() == [-1, -1]
    assert state.ref_counts.tolist() == [2, 0] and state.seq_lens.tolist() == [3, 3]
    state.rollback([0, 3], backend)
    assert state.append([1, 0], 1, backend).slots.tolist() == [[3], [-1]]


def test_table_is_full(backend):
    """A request that would need more columns gets nothing and takes no page from the others."""
    state = State(ints([7, 2**31 - 1, 3]), ints([[0, 1], [3, 4], [2, -1]]), ints([5, *[-7] * 5]), ints([1]), 4)
    got = state.append([2, 1, 2], 2, backend)
    assert got.status.tolist() == [FULL, FULL, 0]
    assert state.seq_lens.tolist() == [7, 2**31 - 1, 5] and state.block_table.tolist() == [[0, 1], [3, 4], [2, 5]]
    long = State(ints([2**31 - 2] * 2), ints([[0, 1]] * 2), ints([-7] * 5), ints([0]), 2**31 - 1)
    got = long.append([1, 2], 2, backend)
    assert got.status.tolist() == [0, FULL] and got.slots.tolist() == [[2**31 - 2, -1], [-1, -1]]


def test_slots_are_64_bit(backend):
    state = State(ints([3]), ints([[40_000, -1]]), ints([50_000, *[-7] * 59_999]), ints([1]), 65_536)
    state.seq_lens.fill_(65_535)
    assert state.append([2], 2, backend).slots.tolist() == [[40_000 * 65_536 + 65_535, 50_000 * 65_536]]


def test_entries_that_are_no_pages(backend):
    """A partly filled block without a page, or rubbish on the free list: refused, and nothing is read or written through it."""
    state = State(
        ints([5, 5, 5, 4]),
        ints([[0, -1], [1, 7], [2, -9], [3, -99]]),
        ints([6, *[-7] * 6]),
        ints([1]),
        4,
        ints([1] * 7),
    )
    got = state.append([1] * 4, 1, backend)
    assert got.status.tolist() == [BAD, BAD, BAD, 0] and got.slots.tolist() == [[-1], [-1], [-1], [24]]
    for rubbish in (-1, 7, 2**31 - 1, -(2**31)):
        state = State(
            ints([4, 3]), ints([[0, -1], [1, -1]]), ints([4, rubbish, *[-7] * 5]), ints([2]), 4, ints([1] * 7)
        )
        before = state.copy()
        got = state.append([1, 1], 1, backend)
        assert got.status.tolist() == [BAD, 0] and got.slots.tolist() == [[-1], [7]]
        assert state.free() == before.free() and torch.equal(state.block_table, before.block_table)


def test_nothing_new_is_untouched(backend):
    state = State(
        ints([-5, 7]), ints([[2**31 - 1, -9], [0, 99]]), ints([1, 2, -7, -7]), ints([2]), 4, ints([1, 0, 0, -3])
    )
    before = state.copy()
    got = state.append([0, -4], 3, backend)
    assert (got.slots == -1).all() and got.status.tolist() == [0, 0]
    assert_same_bits(list(state.tensors().values()), list(before.tensors().values()))


def test_many_blocks_and_many_requests(backend):
    """More blocks than one look takes, and more requests."""
    state = make_state([700, 3], 1, 2000, spare=1400, share=0.5, seed=1)
    got = assert_append_as_oracle(state, [900, 500], 1000, backend)
    assert got.status.tolist() == [0, 0]
    state = make_state([3] * 700, 2, 3, spare=0, share=0.3, seed=2)
    got = assert_append_as_oracle(state, [2, 0, 3, 1] * 175, 4, backend)
    assert 50 < (got.status == OUT).sum() < 525


def test_rows_of_a_larger_table(backend):
    whole = torch.full((6, 10), 12345, dtype=torch.int32)
    state = make_state([30, 17, 40], 8, 7, share=0.5)
    view = whole[::2, 2:9]
    view.copy_(state.block_table)
    state = state.copy()
    state.block_table = view
    assert_append_as_oracle(state, [9, 3, 12], 12, backend)
    assert (whole[1::2] == 12345).all() and (whole[:, :2] == 12345).all() and (whole[:, 9:] == 12345).all()


def outputs(B: int, max_new: int) -> AppendOutput:
    i32 = lambda: torch.full((B,), 12345, dtype=torch.int32)  # noqa: E731
    return AppendOutput(torch.full((B, max_new), 12345), i32(), i32(), i32())


def test_outputs_are_written_whole(poisoned_memory, backend):
    state = make_state([20, 3, 0, 9], 4, 6, spare=2, share=0.5)
    got = assert_append_as_oracle(state.copy(), [9, 1, 0, 30], 9, backend)
    out = outputs(4, 9)
    again = assert_append_as_oracle(state, [9, 1, 0, 30], 9, backend, out=out)
    assert again is out
    assert_same_bits(got, out)


def test_empty_batch(backend):
    state = State(ints([]), torch.zeros(0, 3, dtype=torch.int32), ints([0, 1]), ints([2]), 4)
    assert state.append([], 5, backend).slots.shape == (0, 5) and state.free() == [0, 1]


def test_time_does_not_depend_on_the_cache():
    """What is read of the free list and of the counts: an entry a page popped, a few of each block that is written."""
    available("triton")
    state = make_state([64] * 8, 16, 6, spare=500)
    with watching(state.free_pages, state.ref_counts) as watch:
        state.append([20] * 8, 20, "triton")
    assert watch.launches == ["kv_append_slots_kernel"]
    assert watch.reads(0).sum() == 2 * 2 * 8 and watch.reads(1).sum() <= 6 * 8


def compiled_step(seq_lens, new, table, free_pages, num_free, refs, backend):
    out = sk.kv_append_slots(
        seq_lens, new, table, free_pages, num_free, 4, ref_counts=refs, max_new=5, backend=backend
    )  # fmt: skip
    return out, out.slots + 1, seq_lens * 2, table + 0


def test_compiles_whole_with_dynamic_batches(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for B in (4, 7, 5):
        state = random_state(B, 4, 0, share=0.3)
        states = [list(state.copy().tensors().values()) for _ in range(2)]
        got, want = (
            run(s[0], ints([3] * B), *s[1:], backend) for run, s in zip((fn, compiled_step), states, strict=True)
        )
        assert_same_bits([*got[0], *got[1:]], [*want[0], *want[1:]])
        assert_same_bits(*states)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        i32 = lambda *shape: torch.empty(shape, dtype=torch.int32)  # noqa: E731
        out = sk.kv_append_slots(
            i32(4), i32(4), i32(4, 7), i32(20), i32(1), 16, ref_counts=i32(20), max_new=9, backend=backend
        )
        assert out.slots.shape == (4, 9) and out.slots.dtype == torch.int64 and out.copy_dst.shape == (4,)


def good() -> dict:
    state = make_state([5, 3], 4, 3)
    return {**state.tensors(), "page_size": 4, "num_new": ints([1, 0]), "max_new": 2, "out": outputs(2, 2)}


WRONG = {
    "seq_lens": ({"seq_lens": ints([1])}, r"seq_lens must be int32 \[B=2\].*got int32 \[1\]"),
    "num_new": ({"num_new": torch.zeros(2)}, "num_new must be int32 .*got float32"),
    "block_table": ({"block_table": ints([1, 2])}, r"block_table must be int32 \[B, M\], got int32 \[2\]"),
    "columns": ({"block_table": ints([[], []]).int()}, "block_table must be of at least one column"),
    "strides": ({"block_table": torch.zeros(3, 2).int().T}, "block_table must be contiguous in its last"),
    "free_pages": ({"free_pages": ints([])}, r"free_pages must be int32 \[P>=1\].*got int32 \[0\]"),
    "device": ({"num_new": ints([1, 1]).to("meta")}, "num_new must be .*on cpu, got .*on meta"),
    "num_free": ({"num_free": torch.tensor([1])}, "num_free must be int32 .*got int64"),
    "ref_counts": ({"ref_counts": ints([1])}, r"ref_counts must be int32 \[P=11\].*got int32 \[1\]"),
    "page_size": ({"page_size": 0}, r"page_size must be an int in 1..2147483647, got int 0"),
    "max_new": ({"max_new": 0}, r"max_new must be an int in 1..1048575, got int 0"),
    "max_new_float": ({"max_new": 2.0}, "max_new must be an int .*got float 2.0"),
    "out_type": ({"out": tuple(outputs(2, 2))}, "out must be an AppendOutput, got tuple"),
    "out_shape": ({"out": outputs(2, 3)}, r"out.slots must be int64 \[2, 2\] on cpu, got int64 \[2, 3\]"),
    "out_dtype": ({"out": outputs(2, 2)._replace(copy_dst=torch.zeros(2))}, r"out.copy_dst must be int32 \[2\]"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    changes, message = WRONG[name]
    sk.kv_append_slots(**good(), backend=backend)
    call = {"backend": backend, **good(), **changes}
    for t in call["out"]:
        poison(t)
    tensors = [t for t in (*call.values(), *call["out"]) if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match="^kv_append_slots: " + message):
        sk.kv_append_slots(**call)
    assert_same_bits(tensors, before)


def test_page_twice_on_the_free_list(backend):
    """Its count is 1 all the same, whoever has it."""
    state = State(ints([0, 0]), ints([[-1, -1], [-1, -1]]), ints([0, 2, 2]), ints([3]), 4, ints([0, 0, 0]))
    assert_append_as_oracle(state, [5, 3], 5, backend)
    assert state.block_table.tolist() == [[2, 2], [0, -1]] and state.ref_counts.tolist() == [1, 0, 1]
