"""One test per kind of fault that users of such kernels have hit, named after the kind: indexing, degenerate rows, filters.
Distribution, reproducibility and what is around the kernel: test_faults_sampling.py.

Under the same names elsewhere: `guessed_q`, `shared_noise`, `noise_reused_next_step` in test_distribution.py;
`slot_dependent`, `rank_divergence` in test_verify_chain.py; `length_peeks` in test_oracle_enumeration.py and
test_drafters.py; `ragged_rollback`, `sliding_window_rollback`, `silent_noncroppable` in test_ragged_cache.py.
Without an op or a backend here yet: `block_stops_early`, `wrong_tree_pairing`, `graph_replay_same`,
`rollback_across_pages`, `overlap_move`, `state_not_rolled_back`, `drift_of_signature`, `silent_jit`.
"""

import math
from dataclasses import replace

import pytest
import torch

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    FILTERS,
    ORDERS,
    assert_same_bits,
    chain,
    create,
    ids,
    make_call,
    make_params,
    make_rows,
    offsets,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
INF, NAN = math.inf, math.nan


def kept(row, backend, order="hf", **filters):
    """Token ids that a filter keeps of one row."""
    p = sk.filter_probs(torch.as_tensor(row)[None], create(**filters), filter_order=order, backend=backend)
    return p[0].nonzero().flatten().tolist()


# --- indexing and memory ------------------------------------------------------------------------------------------------


def test_row_offset_overflow(backend, tmp_path):
    """Rows past element 2^32 of one buffer, for target and draft. The buffer is a sparse file: only what is read is there."""
    vocab, rows = 151936, 28300
    path = tmp_path / "huge"
    with path.open("wb") as f:
        f.truncate(rows * vocab * 2)
    huge = torch.from_file(str(path), shared=True, size=rows * vocab, dtype=torch.bfloat16).view(rows, vocab)
    assert huge.numel() > 2**32
    D = rows - 2 - 3  # request 0 owns all rows but the last three; K cuts it, so that only its first rows are read
    used = make_rows("lm", 6, vocab, torch.bfloat16)
    huge[:3], huge[D - 2 + 1 : D + 2] = used[:3], used[3:]
    drafts = torch.zeros(D, dtype=torch.int32)
    params = create(1.0, n=2, seed=3, top_p=0.9)
    request = torch.tensor([0, 0, 1, 1])
    rows_q = torch.tensor([0, 1, D - 1, D])
    proposed = sk.sample(huge[rows_q], params, rows=request, ids=torch.tensor([0, 1, 0, 1]), stream=0, backend=backend)
    drafts[:2], drafts[-2:] = proposed.tokens[:2], proposed.tokens[2:]
    draft_rows = torch.zeros(D, dtype=torch.int64)
    draft_rows[1], draft_rows[-2:] = 1, rows_q[2:]
    options = {"draft_logits": huge, "draft_rows": draft_rows, "draft_params": params, "max_draft": 2}
    out = sk.verify_chain(
        huge, drafts, offsets([D - 2, 2]), params, logprobs=1, return_nucleus=True, backend=backend, **options
    )
    small = {"draft_logits": used, "draft_rows": torch.tensor([0, 1, 3, 4]), "draft_params": params}
    want = sk.verify_chain(
        used, torch.cat([drafts[:2], drafts[-2:]]), offsets([2, 2]), params, logprobs=1, return_nucleus=True,
        backend=backend, **small,
    )  # fmt: skip
    assert out.status.tolist() == [32, 0]
    assert_same_bits(out._replace(status=want.status), want)
    assert out.num_accepted.tolist() == [2, 2]
    # A row stride that leaps 2^32 elements at once, through the row ops.
    far = torch.as_strided(huge.view(-1), (2, vocab), (rows // 2 * 2 * vocab - 4 * vocab, 1))
    assert far.stride(0) > 2**32
    assert_same_bits(
        sk.sample(far, params, return_nucleus=True, backend=backend),
        sk.sample(far.clone(), params, return_nucleus=True, backend=backend),
    )


def test_tail_tile_token(backend):
    """Lanes past V hold zeros in a careless kernel: they would beat logits of -1e30. Every V up to past two groups."""
    for vocab in [*range(1, 140), 4095, 4097, 8193]:
        rows = torch.full((4, vocab), -1e30)
        rows[:, -1] = -1e29 if vocab > 1 else -1e30
        params = create([0.0, 1.0, 1.0, 1e10], n=4, top_p=[1.0, 0.5, 1.0, 1.0])
        tokens = sk.sample(rows, params, backend=backend).tokens.tolist()
        assert tokens[:3] == [vocab - 1] * 3 and 0 <= tokens[3] < vocab
        out = chain(rows[:2], [vocab - 1], backend, params=create(1.0))
        assert out.tokens.tolist() == [[vocab - 1] * 2]
        assert sk.nucleus(rows, params, backend=backend).row_max.tolist() == rows[:, -1].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_strided_logits(dtype, backend):
    """Views with an offset and a row stride, padding rows past N, everything around them NaN: the contiguous call's bits."""
    call = make_call(kind="lm", vocab=333, dtype=dtype, seed=8)

    def in_view(t, extra_rows):
        big = torch.full((t.shape[0] + extra_rows + 3, 333 + 29), NAN, dtype=dtype)
        view = big[2 : 2 + t.shape[0] + extra_rows, 7 : 7 + 333]
        view[: t.shape[0]] = t
        return view

    want = call.run(backend)
    target, draft = in_view(call.target, 4), in_view(call.options["draft_logits"], 2)
    assert not target.is_contiguous() and target.storage_offset() % 2 == 1
    assert_same_bits(call.but(target=target, draft_logits=draft).run(backend), want)
    n = len(call.lengths)
    for op in (sk.nucleus, sk.filter_probs, sk.sample):
        assert_same_bits(
            op(target[:n], call.params, backend=backend), op(call.target[:n].contiguous(), call.params, backend=backend)
        )


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("draft", [-1, -(2**31), 50, 2**31 - 1, -(2**62), 2**40])
def test_placeholder_read(draft, rule, backend):
    """The chain ends at a placeholder, whose row emits from p; the tail's -1 never compares equal to a draft."""
    target = make_rows("normal", 6, 50)
    good = int(target[0].argmax())
    params = create([0.0, 1.0], n=2)
    dtype = torch.int32 if -(2**31) <= draft < 2**31 else torch.int64
    drafts = torch.tensor([good, draft, draft, draft], dtype=dtype)
    q = {"draft_logits": target[[0, 1, 3, 4]], "draft_params": params}
    for extra in ({}, q, {"draft_probs": q["draft_logits"].softmax(1)}):
        out = chain(target, drafts, backend, params=params, lengths=[2, 2], rule=rule, **extra)
        assert out.num_accepted.tolist() == [1, 0]
        assert out.status.tolist() == [16, 16]
        plain = sk.sample(target[[1, 3]], params, torch.tensor([1, 0]), backend=backend).tokens.tolist()
        assert out.tokens.tolist() == [[good, plain[0], -1], [plain[1], -1, -1]]


def test_stale_counter(backend):
    """Buffers of an earlier, longer call are written whole."""
    call = make_call(vocab=60, seed=2)
    want = call.run(backend)
    out = call.run(backend)
    for t in (*out[:5], *out.nucleus):
        t.fill_(77)
    again = call.run(backend, out=out)
    assert again is out
    assert_same_bits(again, want)
    short = call.but(cu=torch.zeros_like(call.cu), max_draft=want.tokens.shape[1] - 1)
    assert_same_bits(short.run(backend, out=out), short.run(backend))
    assert (out.num_emitted == 1).all() and (out.tokens[:, 1:] == -1).all()


# --- not-a-number, infinities, degenerate rows --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_nan_row(rule, backend):
    """A NaN logit counts as -inf and is reported; an all-NaN row ends its own request; nobody else's bits change."""
    call = make_call(vocab=120, filters=FILTERS[:4], lengths=[2, 2, 2, 2], q="none", rule=rule, seed=5)
    clean = call.run(backend)
    target = call.target.clone()
    target[0, 3] = NAN
    target[6] = NAN
    out = call.but(target=target).run(backend)
    masked = call.but(target=torch.where(target.isnan(), -INF, target)).run(backend)
    assert torch.equal(out.tokens, masked.tokens)
    assert out.status.tolist() == [2, 0, 3, 0]
    assert out.tokens[2].tolist() == [0, -1, -1] and out.logprobs[2, 0] == -INF
    for b in (1, 3):
        assert_same_bits([t[b] for t in out[:5]], [t[b] for t in clean[:5]])
    draft = torch.full((8, 120), NAN)
    q = chain(
        call.target,
        call.drafts,
        backend,
        params=make_params(FILTERS[:4]),
        lengths=[2] * 4,
        draft_logits=draft,
        draft_params=create(1.0, n=4),
    )
    assert [int(s) & 8 for s in q.status] == [8, 8, 0, 8]  # request 2 is greedy and reads no q


def test_all_masked_row(backend):
    target = torch.full((3, 70), -INF)
    target[1, 5] = 1.0
    for params in (create(0.0, n=2), create(1.0, n=2, top_p=0.5, top_k=3, min_p=0.1)):
        out = chain(target, [4], backend, params=params, lengths=[0, 1], return_nucleus=True)
        assert out.tokens.tolist() == [[0, -1], [5, -1]] and out.status.tolist() == [1, 0]
        assert [float(f[0, 0]) for f in out.nucleus] == [INF, -INF, -INF]
        assert (sk.filter_probs(target, create(1.0, n=3), backend=backend)[0] == 0).all()
        out = chain(target[[1, 0]], [5], backend, params=create(1.0))  # the bonus row is masked
        assert out.tokens.tolist() == [[5, 0]] and out.status.tolist() == [1] and out.num_accepted.tolist() == [1]


@pytest.mark.parametrize("order", ORDERS)
def test_infinite_search(order, backend):
    """Values between which no pivot lies, or whose range or steps overflow: each search ends, with the oracle's answer."""
    one, tiny, big = torch.tensor(1.0), torch.tensor(1e-45), torch.tensor(3.4028235e38)
    n = 600
    pick = torch.arange(n) % 3 == 0
    adjacent = torch.where(pick, one, torch.nextafter(one, torch.tensor(2.0)))
    rows = [
        adjacent,
        torch.where(pick, tiny, 2 * tiny),
        torch.where(pick, big, -big),
        torch.where(pick, torch.nextafter(big, torch.tensor(0.0)), big),
        torch.where(pick, torch.tensor(-INF), big),
        torch.where(pick, torch.tensor(-0.0), torch.tensor(0.0)),
        torch.full((n,), 7.0),
        torch.where(torch.arange(n) == 5, torch.tensor(0.0), torch.tensor(-INF)),
        torch.cat([adjacent[:300], torch.logspace(-44, 38, 300)]),
        torch.arange(n) * 1e-45,
    ]
    for row in rows:
        for p in (0.3, 0.8):
            rows3 = row.expand(3, n)
            params = create([1.0, 0.7, 3.0], n=3, top_p=p, top_k=[0, 250, 0], min_p=[0.0, 0.0, 0.2])
            got = sk.nucleus(rows3, params, filter_order=order, backend=backend)
            ref = python_ref.nucleus(rows3, params, filter_order=order)
            sure = ref.margin > 1e-5
            assert torch.equal(got.cutoff[sure], ref.nucleus.cutoff[sure].float())
            assert got.log_mass.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-30, 9e-6, -1.0, NAN, -INF])
def test_greedy_sentinel_division(temperature, backend):
    """Zero, denormal, sentinel or NaN temperatures that reach the device are greedy and divide nothing."""
    target = make_rows("tied", 3, 40)
    params = replace(create(1.0, top_p=0.5), temperature=torch.tensor([temperature]))
    best = [int((row == row.max()).nonzero()[0]) for row in target]
    out = chain(target, best[:2], backend, params=params, draft_logits=target[:2], draft_params=params)
    assert out.tokens.tolist() == [best] and (out.logprobs == 0).all() and out.status.tolist() == [0]
    assert sk.sample(target[:1], params, backend=backend).tokens.tolist() == best[:1]
    assert sk.filter_probs(target[:1], params, backend=backend).sum() == 1


def test_zero_residual(backend):
    """q >= p everywhere (an unnormalised q), the draft rejected: the row emits from p."""
    n = 60
    target = make_rows("normal", 1, 30).expand(2 * n, 30)
    params = create(1.0, n=n)
    p = sk.filter_probs(target[:1], create(1.0), backend=backend)
    x = int(p.argmax())
    out = chain(
        target,
        [x] * n,
        backend,
        params=params,
        lengths=[1] * n,
        draft_probs=p * 1e4,
        draft_rows=torch.zeros(n, dtype=torch.int64),
    )
    assert (out.num_accepted == 0).all() and (out.status == 0).all()
    plain = sk.sample(target[:n], params, backend=backend).tokens
    assert torch.equal(out.tokens[:, 0], plain) and plain.unique().numel() > 3


@pytest.mark.parametrize("q", ["logits", "nucleus", "probs", "reduced"])
def test_zero_q(q, backend):
    """q(x) = 0: rejected, reported, and the row emits from p rather than from the residual."""
    n = 50
    target = make_rows("normal", 1, 30).expand(2 * n, 30)
    params = create(1.0, n=n)
    x = int(target[0].argmax())
    q_row = make_rows("normal", 1, 30, seed=1)
    q_row[0, x] = -INF
    index = torch.zeros(n, dtype=torch.int64)
    options = {"draft_logits": q_row, "draft_rows": index, "draft_params": params}
    if q == "nucleus":
        nucleus = sk.nucleus(q_row, create(1.0), backend=backend)
        options["draft_nucleus"] = sk.Nucleus(*(f.expand(n).contiguous() for f in nucleus))
    elif q == "probs":
        options = {"draft_probs": q_row.softmax(1), "draft_rows": index}
    elif q == "reduced":
        mapping = torch.arange(30)
        mapping[x] = -1
        options = {**options, "draft_logits": make_rows("normal", 1, 30, seed=1), "target_to_draft": mapping}
    out = chain(target, [x] * n, backend, params=params, lengths=[1] * n, **options)
    assert (out.num_accepted == 0).all() and (out.status == 4).all()
    assert torch.equal(out.tokens[:, 0], sk.sample(target[:n], params, backend=backend).tokens)
    assert (out.tokens[:, 0] == x).any()


# Seeds whose first coin at position 0 is extreme, found by search: the words are LOW_WORD and HIGH_WORD.
LOW_SEED, LOW_WORD = 68886837, 28
HIGH_SEED, HIGH_WORD = 61551765, 4294967283


def test_coin_extremes(backend):
    """The smallest coins do not accept p = 0; the largest, which round to 1 in float32, accept p = q."""
    stream1 = python_ref.rng.words
    assert int(stream1(LOW_SEED, 0, 1, 0, torch.zeros(1, dtype=torch.int64))[0, 0]) == LOW_WORD < 64
    assert int(stream1(HIGH_SEED, 0, 1, 0, torch.zeros(1, dtype=torch.int64))[0, 0]) == HIGH_WORD >= 2**32 - 64
    params = create([1.0, 1.0], n=2, top_k=2)
    params = replace(params, seed=torch.tensor([LOW_SEED, HIGH_SEED]))
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    q_row = row.clone()
    q_row[2] = 5.0
    for x, accepted in (
        (2, [0, 0]),
        (1, [1, 1]),
    ):  # token 2 is cut from p by top-k; token 1 has p = q where q is p's row
        q = (q_row if x == 2 else row).expand(2, 4)
        out = chain(
            row.expand(4, 4), [x, x], backend, params=params, lengths=[1, 1], draft_logits=q, draft_params=params
        )
        assert out.num_accepted.tolist() == accepted
        p = sk.filter_probs(q, params, backend=backend)
        out = chain(row.expand(4, 4), [x, x], backend, params=params, lengths=[1, 1], draft_probs=p)
        assert out.num_accepted.tolist() == accepted


# --- filters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_top_p_one_not_noop(order, backend):
    """top_p >= 1 keeps every finite token, 1e-30 tails too, to the bit; so do top_k >= V and min_p <= 0."""
    row = torch.cat([torch.tensor([20.0]), torch.linspace(-50, 0, 5000)])
    off = sk.nucleus(row[None], create(1.0), filter_order=order, backend=backend)
    assert off.cutoff.item() == -INF
    for filters in ({"top_p": 1.0}, {"top_p": 1.5}, {"top_k": 5001}, {"top_k": -1}, {"min_p": -0.5}, {"min_p": 0.0}):
        assert_same_bits(sk.nucleus(row[None], create(1.0, **filters), filter_order=order, backend=backend), off)


def test_top_p_zero(backend):
    row = torch.tensor([1.0, 3.0, 2.0, 3.0])
    for p in (0.0, -1.0, 1e-30):
        assert kept(row, backend, top_p=p) == [1, 3]
    assert sk.sample(row[None], create(1.0, top_p=0.0, seed=3), backend=backend).tokens.item() in (1, 3)


@pytest.mark.parametrize("order", ORDERS)
def test_kept_mass_short(order, backend):
    """The token that crosses p is kept."""
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sizes = [len(kept(row, backend, order, top_p=p)) for p in (0.01, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96, 0.999)]
    assert sizes == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_ties_cut(dtype, backend):
    """Equal logits at the cutoff all stay, in whatever order they stand."""
    row = torch.cat([torch.tensor([9.0, 8.0]), torch.full((40,), 5.0), torch.zeros(500)]).to(dtype)
    for seed in range(3):
        order = torch.randperm(row.numel(), generator=torch.Generator().manual_seed(seed))
        for filters in ({"top_k": 3}, {"top_k": 41}, {"top_p": 0.97}, {"top_k": 20, "top_p": 0.97}, {"min_p": 0.018}):
            expected = row[order] >= 5
            assert kept(row[order], backend, **filters) == expected.nonzero().flatten().tolist(), filters


def test_pivot_and_sum_mismatch(backend):
    """The mass that is reported is the mass of what the reported cutoff keeps; what is kept is no less likely than what is not."""
    for kind in ("normal", "tied", "lm", "peaked"):
        rows = make_rows(kind, 6, 3000)
        params = create(
            0.9, n=6, top_p=[0.1, 0.5, 0.9, 0.99, 1.0, 0.7], top_k=[0, 0, 0, 0, 77, 900], min_p=[0, 0, 0, 0.001, 0, 0]
        )
        nucleus = sk.nucleus(rows, params, backend=backend)
        p = sk.filter_probs(rows, params, backend=backend)
        for z, p_row, cutoff, log_mass in zip(rows, p, nucleus.cutoff, nucleus.log_mass, strict=True):
            w = ((z.double() - z.max()) / float(params.temperature[0])).exp()
            assert abs(w[z >= cutoff].sum().log() - log_mass) < 2e-6
            assert torch.equal(p_row > 0, (z >= cutoff) & (w > 1e-37))
            assert (z == cutoff).any()


def test_peaked_row_inaccuracy(backend):
    """One token of p = 0.999999 and a tail: relative accuracy holds on both."""
    row = torch.cat([torch.tensor([30.0]), make_rows("normal", 1, 4000)[0]])
    for temperature, top_p in ((1.0, 1.0), (1.5, 0.9999999), (0.5, 1.0), (3.0, 0.95)):
        params = create(temperature, top_p=top_p)
        got = sk.filter_probs(row[None], params, backend=backend)[0].double()
        ref = python_ref.nucleus(row[None], params)
        want = python_ref.filter_probs(row[None], params)[0]
        if ref.margin < 1e-5:  # which tail token crosses is below float32's resolution; its probability is not
            want = torch.where(
                got > 0, ((row.double() - 30) / float(params.temperature)).exp() / ref.nucleus.log_mass[0].exp(), 0.0
            )
        assert ((got - want).abs() <= want * 2e-5 + 1e-37).all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=ids(DTYPES[1:]))
def test_low_precision_cumsum(dtype, backend):
    """A flat row of 30,000 tokens: its mass is far past what bf16 or f16 can count. The float32 row's bits."""
    rows = make_rows("flat", 2, 30000, dtype)
    params = create(1.0, n=2, top_p=[0.9, 1.0])
    got = sk.nucleus(rows, params, backend=backend)
    for a, b in zip(got, sk.nucleus(rows.float(), params, backend=backend), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)
    assert abs(got.log_mass[1] - ((rows[1].double() - rows[1].max()).exp().sum()).log()) < 4e-6


@pytest.mark.parametrize("order", ORDERS)
def test_spec_nonspec_mismatch(order, backend):
    """A request without drafts is plain sampling, to the bit, under every filter and rule."""
    for dtype in DTYPES:
        rows, params = make_rows("lm", len(FILTERS), 700, dtype), make_params()
        position = torch.arange(len(FILTERS)) * 3
        plain = sk.sample(rows, params, position, logprobs=1, return_nucleus=True, filter_order=order, backend=backend)
        for rule in ("token", "block", "coupled"):
            out = sk.verify_chain(
                rows, torch.zeros(0, dtype=torch.int32), offsets([0] * len(FILTERS)), params, position, rule=rule,
                logprobs=1, return_nucleus=True, filter_order=order, backend=backend,
            )  # fmt: skip
            assert_same_bits(
                [out.tokens[:, 0], out.status, out.logprobs[:, 0], *(f[:, 0] for f in out.nucleus)],
                [plain.tokens, plain.status, plain.logprobs, *plain.nucleus],
            )
