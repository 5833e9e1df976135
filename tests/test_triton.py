"""What the Triton kernels promise beside their numbers: launches, bytes, order of programs, workspace."""

import threading

import pytest
import torch

import specdec_kernels as sk
from bench import _gpu_checks
from tests.cache_cases import cache_case
from tests.cases import Tally, assert_same_bits, compare, make_call, make_params, make_rows
from tests.conftest import available
from tests.interpreter import watching
from tests.kv_states import make_state
from tests.tree_cases import make_tree_call


@pytest.fixture(autouse=True)
def triton():
    return available("triton")


SOME = [(0.8, 0.9, 0, 0.0), (1.0, 0.95, 50, 0.0), (0.9, 1.0, 0, 0.02)]


def test_launches():
    call = make_call(vocab=300, filters=SOME, lengths=[2, 0, 1])
    tree = make_tree_call(vocab=300, rule="traversal", replacement=False, filters=SOME)
    lossy = make_tree_call(vocab=300, rule="typical", filters=SOME)
    caches, other = [torch.zeros(3, 20, 2, 8) for _ in range(12)], torch.zeros(3, 20, 8)
    path, lengths = torch.tensor([[1, 3]] * 3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    pages = torch.tensor([0, -1, 9])
    rows, params, drafts = call.target[:3], call.params, torch.zeros(3, 40, dtype=torch.int64)
    for run, kernels in (
        (lambda: sk.nucleus(rows, params, backend="triton"), ["nucleus_kernel"]),
        (lambda: sk.sample(rows, params, backend="triton"), ["nucleus_kernel", "sample_kernel"]),
        (
            lambda: sk.markov_step(rows, drafts[0, :3], *[torch.ones(300, 8)] * 2, params, backend="triton"),
            ["markov_kernel", "nucleus_kernel", "sample_kernel"],
        ),
        (lambda: sk.filter_probs(rows, params, backend="triton"), ["nucleus_kernel", "filter_probs_kernel"]),
        (lambda: call.run("triton"), ["decide_kernel", "emit_kernel"]),
        (lambda: call.but(rule="block").run("triton"), ["decide_kernel", "emit_kernel"]),
        (lambda: call.but(rule="coupled").run("triton"), ["decide_kernel", "emit_kernel"]),
        (lambda: tree.run("triton"), ["walk_kernel", "leaf_kernel"]),
        (lambda: lossy.run("triton"), ["lossy_walk_kernel", "leaf_kernel"]),
        (
            lambda: sk.schedule_lengths(torch.rand(3, 4), budget=5, backend="triton"),
            ["schedule_lengths_kernel"],
        ),
        (lambda: sk.build_tree(torch.zeros(3, 40), *[drafts] * 2, 9, backend="triton"), ["build_tree_kernel"]),
        (lambda: make_state([9, 3], 4, 5).rollback([6, 2], "triton"), ["kv_rollback_kernel"]),
        (lambda: make_state([9, 3], 4, 5).append([6, 2], 6, "triton"), ["kv_append_slots_kernel"]),
        (
            lambda: make_state([9, 3], 4, 5).rollback([6, 2], "triton", scrub=[torch.zeros(14, 4, 8)] * 2),
            ["kv_rollback_kernel", "kv_scrub_kernel"],
        ),
        (lambda: sk.kv_copy_pages(caches, pages, pages + 1, backend="triton"), ["kv_copy_pages_kernel"]),
        (lambda: make_state([9, 3], 4, 5).evict(2, "triton"), ["kv_evict_kernel"]),
        (lambda: sk.kv_compact(caches, path, lengths, backend="triton"), ["kv_compact_kernel"]),
        (lambda: sk.kv_compact([*caches, other, other], path, lengths, backend="triton"), ["kv_compact_kernel"] * 2),
        (lambda: sk.state_select(caches, lengths, backend="triton"), ["state_select_kernel"]),
    ):
        with watching() as watch:
            run()
        assert watch.launches == kernels


def model_like(vocab, n=1, seed=0):
    return make_rows("lm", n, vocab, torch.bfloat16, seed)


@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_a_row_is_read_once_in_the_common_case(vocab):
    """A model's row under top-p: every logit once, and a few subtiles again. All of them again is the flat row's price."""
    params = sk.SamplingTensors.create(0.8, 0.9, seed=0, batch_size=1)
    rows = model_like(vocab)
    with watching(rows) as watch:
        sk.sample(rows, params, backend="triton")
    reads = watch.reads(0)
    assert reads.min() == 1
    assert reads.sum() < 1.15 * vocab
    greedy = sk.SamplingTensors.create(0.0, batch_size=1)
    with watching(rows) as watch:
        sk.sample(rows, greedy, backend="triton")
    assert watch.reads(0).sum() <= vocab + 2 * 128


def test_bytes_of_a_step():
    """Target and draft rows once each up to the rejection, none after it, and no noise is made outside the nucleus."""
    vocab, d = 32_000, 3
    call = make_call(kind="lm", vocab=vocab, dtype=torch.bfloat16, filters=SOME[:1] * 2, lengths=[d, d], seed=3)
    call = call.but(drafts=torch.where(torch.arange(2 * d) == 1, call.target[1].argmin(), call.drafts))
    with watching(call.target, call.options["draft_logits"]) as watch:
        out = call.run("triton")
    accepted = out.num_accepted.tolist()
    assert accepted[0] <= 1
    target, draft = (watch.reads(i).sum(1) / vocab for i in (0, 1))
    for b, a in enumerate(accepted):
        rows, q_rows = target[b * (d + 1) : (b + 1) * (d + 1)], draft[b * d : (b + 1) * d]
        assert ((rows[: a + 1] >= 1) & (rows[: a + 1] < 1.2)).all()
        assert ((q_rows[: a + 1] >= 1) & (q_rows[: a + 1] < 1.2)).all()
        assert (rows[a + 1 :] == 0).all() and (q_rows[a + 1 :] == 0).all()


def test_bytes_of_a_tree():
    """`target_only`: the rows of the path once each, nothing of the others. `recursive`: the same of the draft rows."""
    vocab, tree = 32_000, [0, 0, 1, 1, 2, 2]
    for rule in ("target_only", "recursive"):
        replacement = None if rule == "target_only" else True
        call = make_tree_call(
            "lm", vocab, torch.bfloat16, rule, replacement, trees=[tree] * 2, filters=SOME[:1] * 2, noise=0.3, seed=4
        )
        watched = [call.target] + ([] if rule == "target_only" else [call.options["draft_logits"]])
        with watching(*watched) as watch:
            out = call.run("triton")
        assert out.num_accepted.max() > 0
        for b in range(2):
            path = [0, *out.path[b, : int(out.num_accepted[b])].tolist()]
            for i in range(len(watched)):
                reads = watch.reads(i).sum(1)[7 * b : 7 * b + 7] / vocab
                on_path = torch.zeros(7, dtype=torch.bool)
                on_path[path] = True
                if i == 1:
                    on_path[3:] = False  # leaves have no children to draw
                assert ((reads[on_path] >= 1) & (reads[on_path] < 1.2)).all() and (reads[~on_path] == 0).all()


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_only_what_moves_is_read(layout):
    """Every word of a node that moves once, and nothing else of the cache: not a node in its place, none that was rejected."""
    case = cache_case(layout, B=2, layers=2, H=4, D=72)
    path = torch.tensor([[1, 3, 4, 9, -1], [2, 3, -1, -1, -1]], dtype=torch.int32)
    seq_lens, table = torch.tensor([13, 40]), torch.arange(12, dtype=torch.int32).view(2, 6)
    words = [t.view(torch.int64) for t in case.buffers]
    with watching(*words) as watch:
        sk.kv_compact(case.views(case.buffers), path, seq_lens, block_table=table, backend="triton")
    wanted = [torch.zeros_like(t, dtype=torch.int64) for t in words]
    views = [t if layout == "nhd" else t.transpose(1, 2) for t in wanted]
    for b, node in ((0, 3), (0, 4), (0, 9), (1, 2), (1, 3)):
        position = int(seq_lens[b]) + node
        for view in views:
            view[table[b, position // 16], position % 16] = 1
    for i, counts in enumerate(wanted):
        assert torch.equal(torch.from_numpy(watch.reads(i)), counts)


def test_only_the_chosen_snapshot_is_read():
    states = torch.rand(4, 5, 3, 700)
    accepted = torch.tensor([2, 0, 4, 1], dtype=torch.int32)
    with watching(states.view(torch.int64)) as watch:
        sk.state_select([states], accepted, backend="triton")
    reads = watch.reads(0).reshape(4, 5, -1)
    for b in range(4):
        for j in range(5):
            assert (reads[b, j] == int(j == accepted[b] and j > 0)).all()


def test_pointer_tables_are_kept_by_use(monkeypatch):
    """A step's tables are found by their addresses; the oldest goes where there are too many, those of graphs stay."""
    from specdec_kernels.triton import _pointers

    monkeypatch.setattr(_pointers, "_tables", type(_pointers._tables)())
    monkeypatch.setattr(_pointers, "_in_graphs", {})
    monkeypatch.setattr(_pointers, "KEPT", 2)
    a, b, c = ([torch.zeros(8) for _ in range(3)] for _ in range(3))
    first = _pointers.pointers("op", a)
    assert first.table.tolist() == [t.data_ptr() for t in a]
    _pointers.pointers("op", b)
    assert _pointers.pointers("op", list(a)) is first and _pointers.pointers("op", a[::-1]) is not first
    assert _pointers.pointers("op", a) is first and len(_pointers._tables) == 2  # b was the oldest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pointers, "_capturing", lambda device: True)
        assert _pointers.pointers("op", a) is first
        with pytest.raises(RuntimeError, match=r"^op: .*during a CUDA graph capture"):
            _pointers.pointers("op", c)
    _pointers.pointers("op", b), _pointers.pointers("op", c)
    assert len(_pointers._tables) == 2 and _pointers.pointers("op", a) is first


def test_words_are_as_wide_as_the_layout_allows():
    from specdec_kernels.triton._pointers import word_of

    assert [word_of(bits) for bits in (1, 6, 12, 8, 24, 48, 1 << 40)] == [
        (1, False), (2, False), (4, False), (8, False), (8, False), (8, True), (8, True),
    ]  # fmt: skip


def test_an_address_behind_no_table_is_seen(monkeypatch):
    """The check that all tests here run under knows the tensors behind a table, and no others."""
    from triton.runtime.interpreter import InterpreterError

    from specdec_kernels.triton import _pages

    caches, stranger = [torch.zeros(1, 9, 1, 8)], [torch.zeros(1, 9, 1, 8)]
    path = torch.tensor([[2]], dtype=torch.int32)
    real = _pages.pointers
    monkeypatch.setattr(
        _pages, "pointers", lambda op, t: real(op, t)._replace(table=torch.tensor([stranger[0].data_ptr()]))
    )
    with pytest.raises(InterpreterError, match="out of bounds"):
        sk.kv_compact(caches, path, torch.tensor([0]), backend="triton")


def test_a_saved_nucleus_spares_the_draft_rows():
    call = make_call(kind="lm", vocab=32_000, q="nucleus", filters=SOME[:1] * 2, lengths=[2, 2])
    with watching(call.options["draft_logits"]) as watch:
        call.run("triton")
    assert watch.reads(0).sum() < 0.2 * 32_000


@pytest.mark.parametrize("seed", range(3))
def test_programs_in_any_order(seed):
    """The last program of a row and of a request finishes it, whichever that is."""
    for kind, rule, q in (
        ("lm", "token", "logits"),
        ("normal", "coupled", "none"),
        ("hostile", "token", "nucleus"),
        ("normal", "block", "logits"),
    ):
        call = make_call(kind=kind, vocab=9000, rule=rule, q=q, filters=SOME, lengths=[2, 0, 1])
        want = call.run("triton")
        with _gpu_checks.forced_splits(4, 2), watching(order=seed):
            assert_same_bits(call.run("triton"), want, f"{kind} {rule}")
    for rule, replacement in (("target_only", None), ("traversal", False)):
        tree = make_tree_call("normal", 9000, rule=rule, replacement=replacement, filters=SOME, seed=seed)
        want = tree.run("triton")
        with _gpu_checks.forced_splits(4, 2), watching(order=seed):
            assert_same_bits(tree.run("triton"), want, rule)
    rows = make_rows("lm", 3, 9000)
    want = sk.sample(rows, make_params(SOME), logprobs=1, backend="triton")
    with _gpu_checks.forced_splits(4, 4), watching(order=seed):
        assert_same_bits(sk.sample(rows, make_params(SOME), logprobs=1, backend="triton"), want)


def test_counters_return_to_zero(monkeypatch):
    """A workspace is used again without being cleared: by other ops, shapes and lengths."""
    from specdec_kernels.triton import _launch

    kept = _launch.Workspace(torch.device("cpu"))
    monkeypatch.setattr(_launch, "Workspace", lambda device: kept)
    for seed in range(3):
        call = make_call(
            kind="hostile", vocab=300, rule=("token", "block", "coupled")[seed % 3], filters=SOME, seed=seed
        )
        for variant in (call, call.but(emit_bonus=call.options["rule"] == "block"), call.but(max_draft=1)):
            variant.run("triton")
            assert not kept.counters.any()
        tree = make_tree_call(
            "hostile", 300, rule="recursive", replacement=seed == 1, filters=SOME, seed=seed, trees=[[0, 0], [], [0, 1]]
        )
        for variant in (tree, tree.but(max_depth=0)):
            variant.run("triton")
            assert not kept.counters.any()
        sk.sample(call.target[:3], call.params, backend="triton")
        sk.filter_probs(call.target[:3], call.params, backend="triton")
        assert not kept.counters.any()


def test_a_call_that_fails_leaves_no_counters():
    """Between its launches: what it had counted must not reach the next call."""
    from specdec_kernels.triton import _launch

    kept = _launch.Workspace(torch.device("cpu"))
    sizes = (3, 32, {"done": 3, "best": 5}, {"peak": 3})
    with pytest.raises(KeyboardInterrupt), kept.held(*sizes) as scratch:
        scratch["done"].fill_(1)
        raise KeyboardInterrupt
    with kept.held(*sizes) as scratch:
        assert not scratch["done"].any() and not scratch["best"].any()


def test_what_is_kept_belongs_to_no_pool(monkeypatch):
    """Memory pools and inference mode are a thread's own. A kept workspace that grew inside one would be taken for a leak by
    inductor's graph warm-up, or die with the pool; a call's own workspace must come from the capturing thread's pool."""
    from specdec_kernels.triton import _launch

    threads = []
    for name in ("empty", "zeros"):
        create = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, _f=create, **k: (threads.append(threading.get_ident()), _f(*a, **k))[1]
        )
    for kept in (True, False):
        workspace = _launch.Workspace(torch.device("cpu"), kept=kept)
        threads.clear()
        with torch.inference_mode(), workspace.held(3, 32, {"done": 3}, {"peak": 3}) as scratch:
            assert scratch["space"].shape[0] == 3 * (3 * 32 + 1024)
        assert len(threads) == 2 and (threading.get_ident() in threads) == (not kept)
        assert workspace.counters.is_inference() == (not kept)


def test_a_workspace_that_cannot_grow():
    """The error of the allocation reaches the caller, and the workspace works afterwards."""
    from specdec_kernels.triton import _launch

    workspace = _launch.Workspace(torch.device("cpu"), kept=True)
    with pytest.raises(RuntimeError):
        workspace.take(1 << 50, 32, {"done": 3}, {})
    assert workspace.take(2, 32, {"done": 3}, {})["done"].tolist() == [0, 0, 0]


def test_alignment_does_not_depend_on_the_batch():
    """Triton compiles a kernel for each alignment of its pointers: parts of the workspace start at multiples of 128 bytes."""
    from specdec_kernels.triton import _launch

    for n in (1, 3, 7, 64):
        taken = _launch.Workspace(torch.device("cpu")).take(n, 32, {"done": n, "best": n}, {"peak": n, "cutoff": 3 * n})
        start = {t.dtype.itemsize: t.data_ptr() for t in (taken["space"], taken["done"])}
        assert all((t.data_ptr() - start[t.dtype.itemsize]) % 128 == 0 for t in taken.values())


def test_fp32_copy_oom(monkeypatch):
    """The workspace is a small part of a float32 copy of the logits: V / 128 maxima, masses and list entries a row and 1,024
    candidates."""
    from specdec_kernels.triton import _launch

    kept = _launch.Workspace(torch.device("cpu"))
    monkeypatch.setattr(_launch, "Workspace", lambda device: kept)
    call = make_call(kind="lm", vocab=128_256, filters=SOME[:2], lengths=[1, 1])
    call.run("triton")
    copies = 4 * (call.target.numel() + call.options["draft_logits"].numel())
    # Twice over: buffers grow to powers of two.
    assert 4 * kept.scratch.numel() + 8 * kept.counters.numel() < 0.07 * copies


def test_vocabulary_past_half_a_million():
    """Subtiles grow, so that a row still has at most 1,024 of them."""
    rows, params = (
        make_rows("lm", 1, 600_000, torch.bfloat16),
        sk.SamplingTensors.create(0.8, 0.9, seed=1, batch_size=1),
    )
    got = sk.sample(rows, params, logprobs=1, return_nucleus=True, backend="triton")
    want = sk.sample(rows, params, logprobs=1, return_nucleus=True, backend="eager")
    assert got.tokens == want.tokens and got.nucleus.cutoff == want.nucleus.cutoff
    assert abs(got.logprobs - want.logprobs) < 1e-5


def test_vocabulary_too_large():
    rows = torch.zeros(1, 1).expand(1, (1 << 24) + 1)
    with pytest.raises(ValueError, match="logits must be over at most"):
        torch.ops.specdec_kernels.nucleus_triton(
            rows, *(torch.zeros(1) for _ in range(2)), torch.zeros(1, dtype=torch.int32), torch.zeros(1), None, None, 0,
            *(torch.zeros(1) for _ in range(3)), torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip


def test_rows_of_outputs_too_wide():
    call = make_call(vocab=20, filters=SOME[:1], lengths=[1])
    with pytest.raises(ValueError, match="max_draft must be below 1048576 for backend 'triton', got 1048576"):
        call.but(max_draft=1 << 20).run("triton")
    tree = make_tree_call(vocab=20, filters=SOME[:1], trees=[[0]])
    with pytest.raises(ValueError, match="max_depth must be below 1048576 for backend 'triton', got 1048576"):
        tree.but(max_depth=1 << 20).run("triton")


def test_a_tile_of_a_small_row_keeps_to_its_maxima():
    """More of them than the workspace has room for would be stored over the masses, inside one tensor, so that no bounds check
    sees it: the kernel asserts it."""
    from specdec_kernels.triton import verify_tree as op

    for vocab in (1, 256, 1008, 4096):
        for dtype in (torch.bfloat16, torch.float32):
            make_tree_call("normal", vocab, dtype, filters=SOME[:1], trees=[[0, 0]]).run("triton")
    call = make_tree_call("normal", 256, torch.bfloat16, filters=SOME[:1], trees=[[0, 0]])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception, match="AssertionError"):
        patch.setattr(op, "min", max, raising=False)
        call.run("triton")


def test_out_of_bounds_is_seen(monkeypatch):
    """The check that all tests here run under does see an access past the end of a tensor."""
    from triton.runtime.errors import InterpreterError

    from specdec_kernels.triton import _launch

    monkeypatch.setattr(_launch, "CANDIDATES", _launch.CANDIDATES.__class__(0))  # a workspace that is too small
    with pytest.raises(InterpreterError, match="out of bounds"):
        sk.nucleus(make_rows("normal", 1, 300), sk.SamplingTensors.create(1.0, 0.9, batch_size=1), backend="triton")


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_parity_at_128256(rule):
    tally = Tally()
    filters = [(0.8, 0.9, 0, 0.0), (0.7, 0.95, 50, 0.02), (0.0, 1.0, 0, 0.0)]
    for kind, dtype in (("lm", torch.bfloat16), ("normal", torch.float32)):
        call = make_call(kind=kind, vocab=128_256, dtype=dtype, rule=rule, filters=filters, lengths=[1, 1, 1])
        compare(call.run("triton"), call.oracle(), tally)
    tally.assert_few(undecided=0.5)
