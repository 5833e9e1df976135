"""`sample` on every backend against the oracle."""

import pytest
import torch
from scipy.stats import chisquare

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    FILTERS,
    KINDS,
    ORDERS,
    SMALL_VOCABS,
    Tally,
    assert_same_bits,
    compare,
    generator,
    ids,
    make_params,
    make_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def both(logits, params, backend, tally, **kw):
    out = sk.sample(logits, params, logprobs=1, return_nucleus=True, backend=backend, **kw)
    compare(out, python_ref.sample(logits, params, **kw), tally)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind, dtype, backend):
    tally = Tally()
    for i, vocab in enumerate(SMALL_VOCABS):
        stream = (0, 2, 2, 0, 2, 0)[i]
        g = generator("sample", stream, kind, vocab)
        n = len(FILTERS)
        extra = {
            "position": torch.randint(-(2**62), 2**62, (n,), generator=g),
            "ids": torch.randint(2**24, (n,), generator=g) if stream == 0 else None,
            "stream": stream,
            "filter_order": ORDERS[i % 3],
        }
        both(make_rows(kind, n, vocab, dtype), make_params(seed=i), backend, tally, **extra)
    tally.assert_few()


@pytest.mark.parametrize("vocab", [32001, 151936])
def test_parity_of_large_vocabularies(vocab, compiled):
    if compiled == "triton" and vocab > 32001:
        pytest.skip("the interpreter takes seconds a row")
    tally = Tally()
    for kind in ("lm", "normal", "masked"):
        for dtype in (torch.float32, torch.bfloat16):
            both(make_rows(kind, 4, vocab, dtype), make_params([FILTERS[i] for i in (0, 1, 3, 8)]), compiled, tally)
    tally.assert_few(undecided=0.5, differ=0.05)


def test_rows_map_to_requests(backend):
    """One request's rows share its parameters and seed, and differ by position."""
    tally = Tally()
    n = 3 * len(FILTERS)
    rows = torch.arange(n, dtype=torch.int32) % len(FILTERS)
    position = torch.arange(n)
    slots = torch.arange(len(FILTERS)).flip(0)
    out = both(make_rows("normal", n, 500), make_params(slots=slots), backend, tally, rows=rows, position=position)
    tally.assert_few()
    assert out.tokens[:36].unique().numel() > 12


def test_reduced_vocabulary_draws_with_target_noise(backend):
    """Noise is keyed by target ids: a reduced head that has all the mass draws what the full row draws."""
    vocab, reduced = 400, 60
    g = generator("reduced")
    chosen = torch.randperm(vocab, generator=g)[:reduced]
    mapping = torch.full((vocab,), -1)
    mapping[chosen] = torch.arange(reduced)
    small = make_rows("normal", 40, reduced)
    full = torch.full((40, vocab), -torch.inf)
    full[:, chosen] = small
    params = sk.SamplingTensors.create([0.0, *[1.0] * 39], 0.95, seed=5)
    tally = Tally()
    out = both(small, params, backend, tally, target_to_draft=mapping)
    tally.assert_few()
    assert_same_bits(out.tokens, sk.sample(full, params, backend=backend).tokens)
    # A map that reaches no kept column: nothing to draw.
    nothing = sk.sample(small, params, target_to_draft=torch.full((7,), -1), logprobs=1, backend=backend)
    assert (nothing.tokens == 0).all() and (nothing.status == 1).all() and (nothing.logprobs == -torch.inf).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.1, 10.0, 1e4, 1e30])
def test_temperatures(temperature, backend):
    tally = Tally()
    for kind in ("normal", "tied", "lm"):
        params = sk.SamplingTensors.create(temperature, batch_size=30, seed=8)
        both(make_rows(kind, 30, 1000), params, backend, tally)
    tally.assert_few()


def test_greedy_takes_the_lowest_maximum(backend):
    rows = torch.full((6, 333), -1.0)
    for i, (first, second) in enumerate([(0, 332), (331, 332), (15, 16), (63, 64), (7, 256), (200, 201)]):
        rows[i, [first, second]] = 2.0
    for dtype in DTYPES:
        out = sk.sample(rows.to(dtype), sk.SamplingTensors.create(0.0, batch_size=6), logprobs=1, backend=backend)
        assert out.tokens.tolist() == [0, 331, 15, 63, 7, 200]
        assert (out.logprobs == 0).all()


def test_no_rows(backend):
    out = sk.sample(
        torch.zeros(0, 7), sk.SamplingTensors.create(batch_size=0), logprobs=1, return_nucleus=True, backend=backend
    )
    assert out.tokens.shape == (0,)


@pytest.mark.parametrize("num_samples", [2, 5, 128])
def test_without_replacement(num_samples, backend):
    """The first of the race in order, the oracle's; -1 where the row has no more; greedy rows their largest logits."""
    tally = Tally()
    for i, kind in enumerate(KINDS):
        if backend == "triton" and num_samples == 128 and i % 3:  # 128 looks at each row take the interpreter its time
            continue
        vocab, n = (17, 300, 1000)[i % 3], len(FILTERS)
        position = torch.arange(n) * 5
        out = both(
            make_rows(kind, n, vocab, DTYPES[i % 3]), make_params(seed=i), backend, tally, num_samples=num_samples,
            position=position, stream=0, ids=torch.arange(n), filter_order=ORDERS[i % 3],
        )  # fmt: skip
        assert out.tokens.shape == (n, num_samples)
        for row in out.tokens.tolist():
            drawn = [t for t in row if t >= 0]
            assert len(set(drawn)) == len(drawn) and row[len(drawn) :] == [-1] * (num_samples - len(drawn))
    tally.assert_few(undecided=0.3 if num_samples == 128 else 0.06)


def test_without_replacement_first_is_the_plain_draw(backend):
    """One sample and the first of several are the same race; through a map to target ids as well."""
    rows, params = make_rows("normal", len(FILTERS), 200), make_params(seed=4)
    mapping = torch.randperm(200, generator=generator("several"))
    for extra in ({}, {"target_to_draft": mapping}):
        one = sk.sample(rows, params, logprobs=1, backend=backend, **extra)
        several = sk.sample(rows, params, logprobs=1, num_samples=3, backend=backend, **extra)
        assert_same_bits(several.tokens[:, 0].contiguous(), one.tokens)
        assert_same_bits(several.logprobs[:, 0].contiguous(), one.logprobs)
        tally = Tally()
        both(rows, params, backend, tally, num_samples=4, **extra)
        tally.assert_few()


def test_without_replacement_of_a_large_vocabulary(compiled):
    tally = Tally()
    for kind in ("lm", "flat"):
        both(make_rows(kind, 3, 32001), make_params([FILTERS[i] for i in (0, 1, 2)]), compiled, tally, num_samples=4)
    tally.assert_few(undecided=0.5, differ=0.2)


def test_without_replacement_has_its_law(native):
    """Ordered pairs by chi-square: p(x) p(y) / (1 - p(x))."""
    n, vocab = 30_000, 5
    row = make_rows("normal", 1, vocab, seed=3) / 3
    params = sk.SamplingTensors.create(1.0, seed=torch.arange(n))
    pairs = sk.sample(row.expand(n, vocab), params, num_samples=2, backend=native).tokens.long()
    p = python_ref.filter_probs(row, sk.SamplingTensors.create(1.0, batch_size=1))[0]
    law = p[:, None] * p[None] / (1 - p[:, None]) * (1 - torch.eye(vocab))
    counts = torch.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab**2).view(vocab, vocab)
    assert (counts.diagonal() == 0).all()
    off = ~torch.eye(vocab, dtype=torch.bool)
    assert chisquare(counts[off].numpy(), (law[off] * n).numpy()).pvalue > 1e-3


def test_greedy_order_of_odd_values(backend):
    """-0 equals 0, +inf comes first, then the largest of the others, equal ones by id."""
    rows = torch.tensor([[-0.0, 0.0, -1.0], [1.0, torch.inf, 3.0], [-torch.inf, torch.nan, 5.0], [2.0, 2.0, -0.0]])
    params = sk.SamplingTensors.create(0.0, batch_size=4)
    assert sk.sample(rows, params, backend=backend).tokens.tolist() == [0, 1, 2, 0]
    out = sk.sample(rows, params, num_samples=3, backend=backend)
    assert out.tokens.tolist() == [[0, 1, 2], [1, 2, 0], [2, -1, -1], [0, 1, 2]]
    assert out.status.tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("num_samples", [0, 129, 2.0])
def test_num_samples_out_of_range(num_samples):
    with pytest.raises(ValueError, match="num_samples must be an int from 1 to 128, got"):
        sk.sample(make_rows("normal", 1, 9), make_params(FILTERS[:1]), num_samples=num_samples)
