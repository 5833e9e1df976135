"""`filter_probs` on every backend against the oracle."""

import pytest
import torch

import python_ref
import specdec_kernels as sk
from tests.cases import DTYPES, FILTERS, KINDS, ORDERS, SMALL_VOCABS, UNDECIDED, make_params, make_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_parity(order, kind, backend):
    """The same support, and every probability within the float32 error of exp((z - max) / T - log_mass)."""
    skipped = 0
    for i, vocab in enumerate(SMALL_VOCABS):
        dtype = DTYPES[(i + KINDS.index(kind)) % 3]
        rows, params = make_rows(kind, len(FILTERS), vocab, dtype), make_params()
        status = torch.empty(len(FILTERS), dtype=torch.int32)
        got = sk.filter_probs(rows, params, filter_order=order, status=status, backend=backend)
        want = python_ref.filter_probs(rows, params, filter_order=order)
        ref = python_ref.nucleus(rows, params, filter_order=order)
        assert torch.equal(status, ref.status)
        decided = ref.margin >= UNDECIDED
        skipped += int((~decided).sum())
        tiny = want < 2.0**-120  # below that a probability may be flushed to zero
        assert torch.equal((got > 0)[decided] | tiny[decided], (want > 0)[decided] | tiny[decided])
        x = want.clamp_min(1e-37).log().abs()
        assert ((got - want).abs()[decided] <= (want * (2e-6 + 3e-7 * x) + 1e-36)[decided]).all()
    assert skipped <= 2


@pytest.mark.parametrize("vocab", [32001, 151936])
def test_rows_sum_to_one(vocab, backend):
    for kind in ("flat", "normal", "lm"):
        rows = make_rows(kind, 3, vocab, torch.bfloat16)
        got = sk.filter_probs(
            rows, sk.SamplingTensors.create([0.8, 1.0, 0.0], [0.9, 1.0, 1.0], batch_size=3), backend=backend
        )
        assert ((got.double().sum(1) - 1).abs() < 5e-6).all()
        assert got[2].sum() == 1 and got[2].argmax() == (rows[2] == rows[2].max()).int().argmax()


def test_rows_and_out(backend):
    """Parameters by `rows`; `out` is written whole, status too."""
    rows = make_rows("normal", 4, 50)
    index = torch.tensor([3, 3, 0, 1])
    out = torch.full((4, 50), torch.nan)
    returned = sk.filter_probs(rows, make_params(), rows=index, out=out, backend=backend)
    assert returned is out
    want = python_ref.filter_probs(rows, make_params(), rows=index)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=2e-6)
