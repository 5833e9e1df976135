"""`markov_step` on every backend: the row it writes, and the draw from that row."""

import itertools
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from scipy import stats
from torch.nn.functional import embedding

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    FILTERS,
    KINDS,
    ORDERS,
    UNDECIDED,
    Tally,
    assert_same_bits,
    compare,
    create,
    generator,
    ids,
    make_params,
    make_rows,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

#: Significant bits of a value, and the exponent of the least positive one.
PRECISION = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}


def head(vocab, width, rank, dtype=torch.float32, seed=0, exact=False):
    """(w1, w2). `exact`: eighths, whose products and sums of up to 256 terms float32 holds in any order."""
    g = generator("head", vocab, width, rank, seed)
    if exact:
        return tuple(torch.randint(-6, 7, (n, rank), generator=g).div(8).to(dtype) for n in (vocab, width))
    return tuple((torch.randn(n, rank, generator=g) / rank**0.25).to(dtype) for n in (vocab, width))


def coarse(rows):
    """Rows in multiples of 2^-8 up to 64, so that a sum with an `exact` head's product is exact in float32 as well."""
    return ((rows.float() * 256).round() / 256).clamp(-64, 64).to(rows.dtype)


def drawn_as_sample(out, params, backend, **kw):
    """Tokens, status and nuclei are those of `sample` on the row that was written."""
    want = sk.sample(out.logits, params, return_nucleus=out.nucleus is not None, backend=backend, **{"stream": 0, **kw})
    assert_same_bits((out.tokens, out.status), (want.tokens, want.status))
    if out.nucleus is not None:
        assert_same_bits(out.nucleus, want.nucleus)


def ulp(x, dtype):
    """Distance of `dtype`'s values beside |x|."""
    bits, least = PRECISION[dtype]
    exponent = torch.frexp(x.abs().clamp_min(2.0**-1000)).exponent - bits
    return torch.ldexp(torch.ones_like(x), exponent.clamp_min(least))


def assert_rounded(logits, base, tokens, w1, w2):
    """Each logit is within one value of its dtype of the exact sum, and what float32 may lose over r + 1 additions."""
    exact = python_ref.markov_logits(base, tokens, w1, w2)
    known = (tokens >= 0) & (tokens < w1.shape[0])
    heads = torch.where(known[:, None], w1[tokens.long().clamp(0, w1.shape[0] - 1)].double().abs(), 0.0)
    size = heads @ w2.double().abs().T + base.double().abs()
    float32 = (w1.shape[1] + 2) * 2.0**-24 * size
    finite = exact.isfinite()
    error = (logits.double() - exact).abs()[finite]
    bound = (float32 + ulp(exact.abs() + float32, logits.dtype))[finite]
    assert (error <= bound).all(), float((error / bound).max())
    assert torch.equal(logits[~finite].double().nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
    return float(error.max())


# --- the oracle ---------------------------------------------------------------------------------------------------------


def test_by_hand(backend):
    """Two tokens before, rank 2, worked out by hand; then what bf16 keeps of sums that are rounded once, to the nearest."""
    w1, w2 = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    base = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [0.0, 0.25, 0.0]])
    z = [[1.0, 1.5, 3.0], [1.0, 0.5, -1.0], [0.0, 0.25, 0.0]]  # the biases: (0, 1, 3), (0, 0, -1), none
    params, before = create(0.0, n=3), torch.tensor([0, 1, -1])
    for out in (
        python_ref.markov_step(base, before, w1, w2, params),
        sk.markov_step(base, before, w1, w2, params, return_nucleus=True, backend=backend),
    ):
        assert out.logits.tolist() == z and out.tokens.tolist() == [2, 0, 1] and out.status.tolist() == [0, 0, 0]
        assert out.nucleus.cutoff.tolist() == [3.0, 1.0, 0.25]
    # Above 1 bf16 has steps of 2^-7. 1 + 2^-8 is half of one and goes to the even 1; 2^-17 more goes up, but would be lost
    # with a bias that is rounded before it is added.
    w1, w2 = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0**-9, 2.0**-10], [3 * 2.0**-9, 0.0], [2.0**-8, 2.0**-18]])
    base = torch.ones(1, 3, dtype=torch.bfloat16)
    for out in (
        python_ref.markov_step(base, before[:1], w1, w2, create(0.0)),
        sk.markov_step(base, before[:1], w1, w2, create(0.0), backend=backend),
    ):
        assert out.logits.tolist() == [[1.0, 1 + 2.0**-7, 1 + 2.0**-7]]


# --- the written row ----------------------------------------------------------------------------------------------------

SHAPES = ((17, 5, 1), (300, 120, 3), (111, 300, 16), (64, 257, 31), (40, 1000, 33), (90, 16, 100), (50, 520, 256))
"""(V, Vd, r)"""


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("weights", DTYPES, ids=ids(DTYPES))
def test_parity(dtype, weights, backend):
    """Where float32 is exact, row and draw are the oracle's; elsewhere the row is within rounding, and the draw that of
    `sample` on the row, and the oracle's where its margin is wider than what the row may differ by."""
    tally, shapes, filters, kinds_of_head = Tally(), SHAPES, FILTERS, (True, False)
    pair = DTYPES.index(dtype) + DTYPES.index(weights)
    if backend == "triton":  # the interpreter takes its time
        shapes, filters = SHAPES[(1, 3, 2, 5)[pair % 4] :][:1], FILTERS[pair % 3 :: 3]
        kinds_of_head = (True, False) if dtype == weights else (True,)
    for i, (vocab, width, rank) in enumerate(shapes):
        n, kind = len(filters), KINDS[(i + pair) % len(KINDS)]
        g = generator("markov", vocab, width, rank)
        tokens = torch.randint(vocab, (n,), generator=g)
        params = make_params(filters, seed=i)
        keys = {
            "position": torch.randint(-(2**62), 2**62, (n,), generator=g),
            "stream": (0, 2)[i % 2],
            "ids": None if i % 2 else torch.randint(2**24, (n,), generator=g),
        }
        order = {"filter_order": ORDERS[i % 3]}
        base = make_rows(kind, n, width, dtype, seed=i)
        for exact in kinds_of_head:
            w1, w2 = head(vocab, width, rank, weights, seed=i, exact=exact)
            rows = coarse(base) if exact else base
            out = sk.markov_step(rows, tokens, w1, w2, params, **keys, **order, return_nucleus=True, backend=backend)
            drawn_as_sample(out, params, backend, **keys, **order)
            want = python_ref.markov_step(rows, tokens, w1, w2, params, **keys, **order)
            if exact:
                assert torch.equal(out.logits.nan_to_num(7.0), want.logits.nan_to_num(7.0))
                compare(sk.SampleOutput(out.tokens, out.status, None, out.nucleus), want, tally)
                continue
            assert_rounded(out.logits, rows, tokens, w1, w2)
            moved = (out.logits.double() - want.logits.double()).nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
            smooth = (params.temperature > 0) & (params.top_k <= 0)  # ranks have no margin that could be compared
            decided = smooth & (want.margin > UNDECIDED + 4 * moved / params.temperature.clamp_min(1e-3))
            assert torch.equal(out.tokens[decided], want.tokens[decided])
    tally.assert_few()


@pytest.mark.parametrize("rank", [1, 15, 32, 47, 64, 100, 256])
def test_ranks_and_long_rows(rank, native):
    """Each way through the rank's loop, for rows of several tiles, an odd tail and a number of rows that is no block's."""
    for n, width in ((1, 4099), (7, 1033), (13, 600)):
        for dtype, weights in itertools.product(DTYPES, DTYPES):
            tokens = torch.randint(99, (n,), generator=generator(n))
            w1, w2 = head(99, width, rank, weights, exact=True)
            base = coarse(make_rows("normal", n, width, dtype))
            out = sk.markov_step(base, tokens, w1, w2, create(n=n), backend=native)
            assert torch.equal(out.logits, python_ref.markov_logits(base, tokens, w1, w2).to(dtype))
            drawn_as_sample(out, create(n=n), native)


def test_rounds_as_torch_does(native):
    """Every exponent and the halves between values: what a row keeps is torch's own conversion, subnormals and overflow too."""
    bits = torch.arange(0, 2**32, 2**13 - 1, dtype=torch.int64)  # 2^19 floats that end in all ways
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values[values.isfinite()], torch.tensor([65504.0, 65519.99, 65520.0, 2**-24, 2**-25, 1e-45])])
    w2, w1 = values[:, None], torch.ones(1, 1)
    for dtype in DTYPES:
        base = torch.zeros(1, len(values), dtype=dtype)
        out = sk.markov_step(base, torch.tensor([0]), w1, w2, create(), backend=native)
        assert torch.equal(out.logits[0], values.to(dtype))


# --- arguments ----------------------------------------------------------------------------------------------------------


def test_strides(backend):
    """Rows in a persistent [B, K, Vd] buffer, weights cut out of wider ones; what lies beside them stays."""
    n, vocab, width, rank = 4, 30, 77, 20
    tokens, params = torch.tensor([3, 29, 0, 11], dtype=torch.int32), make_params(FILTERS[:n])
    for dtype in (torch.float32, torch.bfloat16):
        (w1, w2), base = head(vocab, width, rank, dtype), make_rows("normal", n, width, dtype)
        want = sk.markov_step(base, tokens, w1, w2, params, return_nucleus=True, backend=backend)
        wide = [torch.full((t.shape[0], t.shape[1] + 3), torch.nan, dtype=dtype) for t in (base, w1, w2)]
        views = [t[:, 2:-1].copy_(s) for t, s in zip(wide, (base, w1, w2), strict=True)]
        buffer = torch.full((n, 3, width), 5.0, dtype=dtype)
        got = sk.markov_step(
            views[0], tokens.long(), *views[1:], params, return_nucleus=True, logits_out=buffer[:, 1], backend=backend
        )
        assert got.logits.data_ptr() == buffer[:, 1].data_ptr()
        assert_same_bits(got, want)
        assert (buffer[:, [0, 2]] == 5).all()


def test_in_place(backend):
    """logits_out may be base_logits: as a tensor, as a view with gaps; and the tokens may be written over those before."""
    n, width = 5, 300
    (w1, w2), base = head(40, width, 32), make_rows("normal", n, width)
    params, tokens = make_params(FILTERS[:n]), torch.tensor([1, 39, 7, -1, 40], dtype=torch.int32)
    want = sk.markov_step(base, tokens, w1, w2, params, backend=backend)
    for rows in (base.clone(), torch.zeros(n, 2, width)[:, 1].copy_(base)):
        got = sk.markov_step(rows, tokens, w1, w2, params, logits_out=rows, backend=backend)
        assert got.logits is rows
        assert_same_bits(got, want)
    rows, before = base.clone(), tokens.clone()
    out = sk.MarkovOutput(before, None, torch.full_like(before, 12345), rows)
    got = sk.markov_step(rows, before, w1, w2, params, out=out, logits_out=rows, backend=backend)
    assert got is out
    assert_same_bits(got, want)


def test_out_is_written_whole(backend):
    rows, params = make_rows("hostile", 12, 70), make_params()
    (w1, w2), tokens = head(9, 70, 8), torch.arange(12) - 1
    args = (rows, tokens, w1, w2, params, torch.arange(12))
    want = sk.markov_step(*args, return_nucleus=True, backend=backend)
    nan, big = (lambda *s: torch.full(s, torch.nan)), (lambda: torch.full((12,), 12345, dtype=torch.int32))
    out = sk.MarkovOutput(big(), sk.Nucleus(nan(12), nan(12), nan(12)), big(), nan(12, 70))
    assert sk.markov_step(*args, return_nucleus=True, out=out, backend=backend) is out
    assert_same_bits(out, want)


def test_tokens_out_of_range_add_no_bias(backend):
    """Nothing is read through them, and weights that are not finite do not reach their rows."""
    (w1, w2), base = head(10, 50, 16), make_rows("normal", 6, 50)
    w2[3] = torch.nan
    tokens = torch.tensor([-1, 10, 2**40, -(2**62), 2**31, 4])
    out = sk.markov_step(base, tokens, w1, w2, create(n=6), backend=backend)
    assert torch.equal(out.logits[:5], base[:5]) and not torch.equal(out.logits[5], base[5])
    assert (out.status[:5] == 0).all()
    drawn_as_sample(out, create(n=6), backend)


def test_rows_that_are_not_finite(backend):
    """NaN, -inf and +inf of base stay what they are; status and token are those of `sample`."""
    base = make_rows("normal", 5, 64)
    base[0, 5], base[1, 7], base[2], base[3, ::2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    w1, w2 = head(8, 64, 16)
    params = create(n=5)
    out = sk.markov_step(base, torch.arange(5), w1, w2, params, return_nucleus=True, backend=backend)
    assert out.logits[0].isnan().nonzero().flatten().tolist() == [5] and out.logits[1, 7] == torch.inf
    assert (out.logits[2] == -torch.inf).all() and (out.logits[3, ::2] == -torch.inf).all()
    assert out.status.tolist() == [2, 0, 1, 0, 0] and out.tokens[:3].tolist()[1:] == [7, 0]
    drawn_as_sample(out, params, backend)
    w1[4] = torch.nan  # a head that is broken for one token spoils that token's rows alone
    broken = sk.markov_step(base, torch.arange(5), w1, w2, params, backend=backend)
    assert broken.status.tolist() == [2, 0, 1, 0, 3]
    assert_same_bits(broken.tokens[:4].clone(), out.tokens[:4].clone())


def test_rows_map_to_requests(backend):
    n = 2 * len(FILTERS)
    rows = torch.arange(n, dtype=torch.int32) % len(FILTERS)
    params = make_params(slots=torch.arange(len(FILTERS)).flip(0))
    w1, w2 = head(50, 200, 16, exact=True)
    tokens, base = torch.arange(n), coarse(make_rows("normal", n, 200))
    keys = {"rows": rows, "position": torch.arange(n), "stream": 2}
    out = sk.markov_step(base, tokens, w1, w2, params, **keys, return_nucleus=True, backend=backend)
    tally = Tally()
    want = python_ref.markov_step(base, tokens, w1, w2, params, **keys)
    compare(sk.SampleOutput(out.tokens, out.status, None, out.nucleus), want, tally)
    tally.assert_few()
    drawn_as_sample(out, params, backend, **keys)


def test_reduced_vocabulary(backend):
    """w1 is over target ids, w2 and the rows over the drafter's columns; target ids come back, and go in again."""
    vocab, width, n = 400, 60, 8 if backend == "triton" else 30
    g = generator("reduced")
    chosen = torch.randperm(vocab, generator=g)[:width]
    mapping = torch.full((vocab,), -1)
    mapping[chosen] = torch.arange(width)
    w1, w2 = head(vocab, width, 24, exact=True)
    base, params = coarse(make_rows("normal", n, width)), create(1.0, 0.95, n=n)
    tokens = torch.randint(vocab, (n,), generator=g)
    tally = Tally()
    for _ in range(2):
        out = sk.markov_step(
            base, tokens, w1, w2, params, target_to_draft=mapping, return_nucleus=True, backend=backend
        )
        want = python_ref.markov_step(base, tokens, w1, w2, params, target_to_draft=mapping)
        compare(sk.SampleOutput(out.tokens, out.status, None, out.nucleus), want, tally)
        assert torch.isin(out.tokens.long(), chosen).all()
        drawn_as_sample(out, params, backend, target_to_draft=mapping)
        tokens = out.tokens
    tally.assert_few()


# --- a drafter's use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupled", [False, True], ids=["stream 0", "coupled"])
def test_chain_is_the_loop_of_torch_and_sample(coupled, backend):
    """Left to right into one buffer, the tokens of a step those before the next; verify_chain takes the rows as q."""
    B, gamma, vocab, rank = 3, 4, 90, 32
    w1, w2 = head(vocab, vocab, rank, exact=True)
    base = coarse(make_rows("normal", B * gamma, vocab)).view(B, gamma, vocab)
    params, anchor, position = make_params(FILTERS[:B]), torch.tensor([5, 80, 33]), torch.tensor([7, 1000, 2**33])

    def keys(k):
        if coupled:
            return {"position": position + k, "stream": 2}
        return {"position": position, "stream": 0, "ids": torch.full((B,), k)}

    rows, tokens, drafts, nuclei = torch.full_like(base, torch.nan), anchor, [], []
    for k in range(gamma):
        out = sk.markov_step(
            base[:, k], tokens, w1, w2, params, **keys(k), return_nucleus=True, logits_out=rows[:, k], backend=backend
        )
        tokens = out.tokens
        drafts.append(tokens)
        nuclei.append(out.nucleus)
    tokens = anchor
    for k in range(gamma):
        z = base[:, k] + embedding(tokens, w1) @ w2.T
        tokens = sk.sample(z, params, **keys(k), backend=backend).tokens
        assert torch.equal(rows[:, k], z) and torch.equal(tokens, drafts[k])
    assert torch.stack(drafts).unique().numel() > 4
    # All accepted where the target's rows are q's own.
    target = torch.cat([rows, make_rows("normal", B, vocab)[:, None]], 1).flatten(0, 1)
    saved = sk.Nucleus(*(torch.stack(f, 1).flatten() for f in zip(*nuclei, strict=True)))
    q = {"draft_logits": rows.flatten(0, 1), "draft_nucleus": saved, "draft_params": params}
    done = sk.verify_chain(
        target, torch.stack(drafts, 1).flatten(), torch.arange(B + 1, dtype=torch.int32) * gamma, params, position,
        rule="coupled" if coupled else "token", max_draft=gamma, backend=backend, **({} if coupled else q),
    )  # fmt: skip
    assert (done.num_accepted == gamma).all() and (done.status == 0).all()


def test_rows_do_not_depend_on_neighbours_or_threads(backend):
    """One batch, each row alone, pairs, another order, several threads: the same bits."""
    n, width = 9, 3000 if backend == "native" else 500
    (w1, w2), base = head(60, width, 64, torch.bfloat16), make_rows("lm", n, width)
    tokens, position = torch.arange(n) * 6, torch.arange(n)
    params = make_params(FILTERS[:n])

    def run(pick):
        p = sk.SamplingTensors(*(getattr(params, f)[pick] for f in ("temperature", "top_p", "top_k", "min_p", "seed")))
        return sk.markov_step(base[pick], tokens[pick], w1, w2, p, position[pick], return_nucleus=True, backend=backend)

    whole = run(torch.arange(n))
    picks = [[i] for i in range(n)] + [[0, 1], [6, 2, 8], list(range(n))[::-1]]
    for pick in map(torch.tensor, picks[::4] if backend == "triton" else picks):
        got = run(pick)
        nucleus = tuple(f[pick] for f in whole.nucleus)
        assert_same_bits(got, (whole.tokens[pick], nucleus, whole.status[pick], whole.logits[pick]))
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert_same_bits(run(torch.arange(n)), whole)
        assert_same_bits(run(torch.tensor([3])).logits, whole.logits[3:4])


def outputs(backend):
    """Of every pair of dtypes, whole and odd ranks and rows, with values that are not finite; and of what rounding can meet."""
    made = []
    for (n, width, rank), dtype, weights in itertools.product(
        ((1, 1000, 256), (7, 777, 47), (3, 100, 100)), DTYPES, DTYPES
    ):
        (w1, w2), base = head(50, width, rank, weights), make_rows("hostile", n, width, dtype)
        made.append(sk.markov_step(base, torch.arange(n) * 7, w1, w2, create(0.8, 0.9, n=n), backend=backend))
    values = torch.arange(0, 2**32, 4093).to(torch.int32).view(torch.float32)[:, None]
    for dtype in DTYPES:
        base = torch.zeros(1, len(values), dtype=dtype)
        made.append(sk.markov_step(base, torch.tensor([0]), torch.ones(1, 1), values, create(), backend=backend))
    return made


def test_instruction_sets(native, tmp_path):
    """SPECDEC_CPU_ISA caps the instruction set; all of them give the same bits."""
    path, want = tmp_path / "outputs.pt", tensors_of(outputs(native))
    code = (
        "import sys, torch; from tests.test_markov_step import outputs; from tests.cases import tensors_of; "
        "torch.save(tensors_of(outputs('native')), sys.argv[1])"
    )
    for isa in ("baseline", "avx2"):
        done = subprocess.run(
            [sys.executable, "-c", code, path], cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True,
            env={**os.environ, "SPECDEC_CPU_ISA": isa}, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert_same_bits(torch.load(path), want, isa)


def test_law(native):
    """One token before, 40,000 seeds: softmax of the biased row by chi-square, and not of the row without its bias."""
    n, vocab = 40_000, 500
    (w1, w2), base = head(vocab, vocab, 16), make_rows("flat", 1, vocab)
    out = sk.markov_step(
        base.expand(n, vocab),
        torch.full((n,), 7),
        w1,
        w2,
        create(n=n),
        logits_out=torch.empty(n, vocab),
        backend=native,
    )
    counts = torch.bincount(out.tokens.long(), minlength=vocab).double()
    for biased in (True, False):
        z = python_ref.markov_logits(base, torch.tensor([7 if biased else -1]), w1, w2)[0]
        expected = z.softmax(0) * n
        large = expected >= 5
        pooled = [torch.cat([t[large], t[~large].sum()[None]]).numpy() for t in (counts, expected)]
        p = stats.chisquare(*pooled).pvalue
        assert p > 1e-3 if biased else p < 1e-9


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_whole(in_place, backend):
    """fullgraph, with weights that are a module's parameters."""
    w1, w2 = map(torch.nn.Parameter, head(20, 30, 8))
    params = make_params(FILTERS[:3])

    def step(base, tokens):
        base = base * 1.0
        out = sk.markov_step(
            base, tokens, w1, w2, params, return_nucleus=True, logits_out=base if in_place else None, backend=backend
        )
        return out.tokens, out.logits + 0, out.nucleus.log_mass

    base, tokens = make_rows("normal", 3, 30), torch.tensor([1, 5, 19])
    want = step(base, tokens)
    assert not want[1].requires_grad
    torch._dynamo.reset()
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(base, tokens), want)


# --- errors -------------------------------------------------------------------------------------------------------------

W1, W2 = head(6, 5, 4)
OUT = sk.MarkovOutput(
    torch.zeros(3, dtype=torch.int32), None, torch.zeros(3, dtype=torch.int32), torch.full((3, 5), 9.0)
)
ERRORS = {
    "base": ({"base_logits": torch.zeros(3, 5).double()}, "base_logits must be .*got float64"),
    "base_columns": ({"base_logits": torch.zeros(5, 3).T}, "base_logits must be contiguous in its last dimension"),
    "tokens": ({"tokens": torch.zeros(3)}, r"tokens must be int32 or int64 \[N=3\].*got float32 \[3\]"),
    "tokens_size": ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"tokens must be .*\[N=3\].*got int64 \[4\]"),
    "w1": ({"w1": W1.double()}, r"w1 must be float32 or bfloat16 or float16 \[V >= 1, r >= 1\] on cpu, got float64"),
    "w1_type": ({"w1": None}, "w1 must be .*got NoneType None"),
    "w1_rank": ({"w1": W1[:, :0]}, r"w1 must be .*got float32 \[6, 0\]"),
    "w1_empty": ({"w1": W1[:0]}, r"w1 must be .*got float32 \[0, 4\]"),
    "w1_columns": ({"w1": torch.zeros(4, 6).T}, r"w1 must be contiguous in its last dimension, got strides \[1, 6\]"),
    "w1_device": ({"w1": W1.to("meta")}, "w1 must be .* on cpu, got .* on meta"),
    "w2_transposed": (
        {"w2": W2.T},
        r"w2 must be float32 \[Vd=5, r=4\], of w1's dtype and rank, .*got float32 \[4, 5\]",
    ),
    "w2_dtype": ({"w2": W2.half()}, r"w2 must be float32 .*got float16"),
    "w2_columns": ({"w2": torch.zeros(4, 5).T}, "w2 must be contiguous in its last dimension"),
    "params": ({"params": make_params(FILTERS[:2])}, r"params.temperature must be float32 \[B=3\]"),
    "position": ({"position": torch.zeros(3)}, r"position must be int64 \[N=3\]"),
    "rows": ({"rows": torch.zeros(2, dtype=torch.int64)}, r"rows must be int32 or int64 \[N=3\]"),
    "ids": ({"ids": torch.zeros(4, dtype=torch.int64)}, r"ids must be int32 or int64 \[N=3\]"),
    "map": ({"target_to_draft": torch.zeros(5)}, "target_to_draft must be int32 or int64"),
    "stream": ({"stream": 1}, "stream must be 0 .* or 2 .*got int 1"),
    "order": ({"filter_order": "x"}, "filter_order must be one of"),
    "backend": ({"backend": "x"}, "backend must be one of"),
    "logits_dtype": ({"logits_out": torch.zeros(3, 5).half()}, r"logits_out must be float32 \[3, 5\].*got float16"),
    "logits_shape": ({"logits_out": torch.zeros(3, 6)}, r"logits_out must be float32 \[3, 5\].*got float32 \[3, 6\]"),
    "logits_columns": ({"logits_out": torch.zeros(5, 3).T}, "logits_out must be contiguous in its last dimension"),
    "logits_shared": (
        {"logits_out": torch.zeros(1, 5).expand(3, 5)},
        r"logits_out must be of rows that do not share memory, got strides \[0, 1\]",
    ),
    "out": ({"out": (1, 2)}, "out must be a MarkovOutput, got tuple"),
    "out_tokens": ({"out": OUT._replace(tokens=torch.zeros(3))}, r"out.tokens must be int32 \[3\].*got float32"),
    "out_logits": ({"out": OUT._replace(logits=torch.zeros(3, 4))}, r"out.logits must be float32 \[3, 5\]"),
    "out_fields": (
        {"out": OUT, "return_nucleus": True},
        "out must be a MarkovOutput made with the same return_nucleus",
    ),
    "out_and_logits": (
        {"out": OUT, "logits_out": torch.zeros(3, 5)},
        "logits_out must be None where out is given, or out.logits, got float32",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name, backend):
    changes, message = ERRORS[name]
    before = torch.tensor([0, 5, 2])
    right = {"base_logits": torch.zeros(3, 5), "tokens": before, "w1": W1, "w2": W2, "params": make_params(FILTERS[:3])}
    right |= {"out": OUT, "backend": backend} if not name.startswith(("out", "logits")) else {"backend": backend}
    OUT.logits.fill_(9.0)
    with pytest.raises(ValueError, match="^markov_step: " + message):
        sk.markov_step(**{**right, **changes})
    assert (OUT.logits == 9).all() and (OUT.tokens == 0).all()


def test_no_rows(backend):
    out = sk.markov_step(
        torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), W1, W2, sk.SamplingTensors.create(batch_size=0),
        return_nucleus=True, backend=backend,
    )  # fmt: skip
    assert out.tokens.shape == (0,) and out.logits.shape == (0, 5)
