"""`sample` on every backend against the oracle."""

import pytest
import torch

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
