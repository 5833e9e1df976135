"""`nucleus` on every backend against the oracle, and against the definition where float32 cannot decide."""

import pytest
import torch

import python_ref
import specdec_kernels as sk
from tests.cases import DTYPES, FILTERS, KINDS, ORDERS, SMALL_VOCABS, UNDECIDED, close, make_params, make_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def run(logits, params, backend, order="hf", **kw):
    status = torch.empty(logits.shape[0], dtype=torch.int32)
    return sk.nucleus(logits, params, filter_order=order, status=status, backend=backend, **kw), status


def assert_matches_oracle(logits, params, backend, order="hf", **kw) -> int:
    """Compares all rows; returns how many were undecided. Those must still keep a right mass."""
    got, status = run(logits, params, backend, order, **kw)
    ref = python_ref.nucleus(logits, params, filter_order=order, **kw)
    assert torch.equal(status, ref.status)
    assert torch.equal(got.row_max, ref.nucleus.row_max.float())
    undecided = ref.margin < UNDECIDED
    moved = got.cutoff != ref.nucleus.cutoff.float()
    wrong = moved & ~undecided
    assert not wrong.any(), (wrong.nonzero().flatten(), got.cutoff[wrong], ref.nucleus.cutoff[wrong], ref.margin[wrong])
    assert close(got.log_mass, ref.nucleus.log_mass)[~moved].all()
    # A cutoff moved across a tie of masses keeps the same mass, up to the margin and the tokens that it moved over.
    assert ((got.log_mass - ref.nucleus.log_mass)[moved].abs() < 1e-3).all()
    return int(undecided.sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_parity(order, kind, backend):
    undecided = 0
    for i, vocab in enumerate(SMALL_VOCABS):
        dtype = DTYPES[(i + KINDS.index(kind)) % 3]
        rows = make_rows(kind, len(FILTERS), vocab, dtype)
        undecided += assert_matches_oracle(rows, make_params(), backend, order)
    assert undecided <= 2


def assert_definition(logits, top_p, temperature, got, slack=UNDECIDED):
    """The cutoff is the largest threshold whose kept mass reaches top_p of the total, masses taken in float64."""
    for n in range(logits.shape[0]):
        z = logits[n].double()
        w = ((z - z.max()) / temperature).exp()
        goal, cutoff = top_p * w.sum(), got.cutoff[n].double()
        assert (z == cutoff).any()
        assert w[z >= cutoff].sum() >= goal * (1 - slack)
        assert w[z > cutoff].sum() < goal * (1 + slack)
        assert abs(got.log_mass[n] - w[z >= cutoff].sum().log()) < 4e-6


@pytest.mark.parametrize("vocab", [8192, 32001, 128256, 151936])
@pytest.mark.parametrize("kind", ["flat", "normal", "lm", "tied"])
def test_top_p_of_large_rows_by_definition(kind, vocab, backend):
    """Flat rows have single tokens below float32's resolution of the mass, so the oracle's cutoff is no fair demand."""
    if backend == "eager" and vocab > 32001:
        pytest.skip("one sort of one row is the same at any size, and slow")
    if backend == "triton" and vocab > 32001 and (kind, vocab) not in (("lm", 128256), ("flat", 151936)):
        pytest.skip("the interpreter takes seconds a row")
    for top_p, temperature, dtype in [
        (0.9, 0.8, torch.float32),
        (0.5, 1.0, torch.bfloat16),
        (0.999, 3.0, torch.float32),
    ]:
        rows = make_rows(kind, 2, vocab, dtype)
        got, _ = run(rows, sk.SamplingTensors.create(temperature, top_p, batch_size=2), backend)
        assert_definition(rows, top_p, temperature, got)


@pytest.mark.parametrize("sign", [-1.5, 1.5])
@pytest.mark.parametrize("period", [2, 8, 16, 37, 64])
def test_rows_that_mislead_a_strided_sample(period, sign, native):
    """Every `period`-th bundle of 16 tokens is unlike the others: an estimate from a regular sample of the row (native
    kernels make some) sees only those, or none of them, and its bracket is wrong. The answer must not be."""
    vocab = 32768
    bundle = torch.arange(vocab) // 16
    rows = make_rows("flat", 2, vocab) + sign * (bundle % period == 0)
    # A multiple of the period's phase as well: the sample starts at bundle 0.
    rows[1] = make_rows("flat", 1, vocab)[0] + 3 * sign * (bundle % period == 0)
    for top_p in (0.3, 0.9, 0.99):
        got, _ = run(rows, sk.SamplingTensors.create(1.0, top_p, batch_size=2), native)
        assert_definition(rows, top_p, 1.0, got)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_mass_hidden_from_a_strided_sample(top_p, native):
    """A few huge tokens between the sampled ones hold most of the mass; or the sampled ones hold almost all of it."""
    vocab = 32768
    rows = make_rows("flat", 3, vocab)
    rows[0, 16 * 5 : 16 * 5 + 40] += 8
    rows[1, (torch.arange(vocab) // 16) % 16 == 0] += 6
    rows[2] = torch.linspace(4, -4, vocab)  # sorted
    got, _ = run(rows, sk.SamplingTensors.create(1.0, top_p, batch_size=3), native)
    assert_definition(rows, top_p, 1.0, got)


@pytest.mark.parametrize("vocab", [4097, 20000])
@pytest.mark.parametrize("order", ORDERS)
def test_top_k_beyond_the_lane_maxima(order, vocab, compiled):
    """A search starts from the maxima of 16 lanes a tile (native), or of subtiles of 128; more tokens than those must be
    found all the same."""
    if compiled == "triton" and (vocab, order) == (20000, "joint"):
        pytest.skip("the interpreter takes seconds a row")
    lanes = -(-vocab // 128) if compiled == "triton" else 16 * -(-vocab // 4096)
    for k in (1, lanes - 1, lanes, lanes + 1, 3 * lanes, vocab // 2, vocab - 1, vocab, 2**31 - 1):
        for kind in ("normal", "tied", "masked"):
            params = sk.SamplingTensors.create(1.0, [1.0, 0.8], k, [0.0, 0.001], seed=[0, 1])
            assert_matches_oracle(make_rows(kind, 2, vocab, seed=k), params, compiled, order)


@pytest.mark.parametrize("temperature", [1e-5, 1.1e-5, 1e-4, 1e-2, 1.0, 1e2, 1e6, 1e30, 3e38])
def test_temperatures(temperature, backend):
    params = sk.SamplingTensors.create(temperature, [1.0, 0.9, 0.5, 1.0], [0, 0, 9, 0], [0, 0, 0.1, 0.5], seed=[0] * 4)
    for kind in ("normal", "tied", "lm"):
        for dtype in DTYPES:
            rows = make_rows(kind, 4, 3000, dtype)
            if temperature <= 100:
                assert_matches_oracle(rows, params, backend)
                continue
            # exp(x) = 1 up to rounding: which tokens top-p and a min-p of 1/2 keep is below float32's resolution.
            got, _ = run(rows, params, backend)
            x = (rows[0].double() - rows[0].double().max()) / temperature
            assert abs(got.log_mass[0] - x.logsumexp(0)) < 2e-6
            assert 0.89 * 3000 < (rows[1].float() >= got.cutoff[1]).sum() <= 3000
            assert got.cutoff[3] == rows[3].min()


def test_rows_and_slots_choose_the_parameters(backend):
    rows = make_rows("normal", 5, 300)
    table = make_params()
    slots = torch.tensor([7, 0, 3], dtype=torch.int32)
    params = make_params(slots=slots)
    index = torch.tensor([2, 2, 0, 1, 2])
    got, _ = run(rows, params, backend, rows=index)
    chosen = slots[index].long()
    flat = sk.SamplingTensors(*(getattr(table, f)[chosen] for f in ("temperature", "top_p", "top_k", "min_p", "seed")))
    want, _ = run(rows, flat, backend)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    clamped, _ = run(rows, params, backend, rows=torch.tensor([9, 2, -4, 1, 2**40]))
    assert torch.equal(clamped.cutoff, got.cutoff)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [1.0, 1e30])
def test_top_k_of_a_row_wider_than_float32(temperature, k, backend):
    """The distance of the values from the maximum overflows: counting must not go through it."""
    rows = torch.tensor([[3.4e38, 0.0, -3.2e38, -3.3e38, -3.4e38], [3.4e38, -3.1e38, -3.2e38, -3.3e38, -3.4e38]])
    got, _ = run(rows, sk.SamplingTensors.create(temperature, top_k=k, batch_size=2), backend)
    assert torch.equal(got.cutoff, rows.sort(descending=True).values[:, k - 1])


def test_no_rows(backend):
    got, status = run(torch.zeros(0, 7), sk.SamplingTensors.create(batch_size=0), backend)
    assert [t.shape for t in (*got, status)] == [(0,)] * 4


@pytest.mark.parametrize("threads", [1, 2])
def test_flushed_denormals_change_nothing(threads, native):
    """torch.set_flush_denormal holds for one thread of several; a row must not depend on which of them takes it."""
    torch.set_num_threads(threads)
    rows = torch.arange(1, 65, dtype=torch.int32).view(torch.float32).repeat(16, 64)  # subnormal numbers
    params = sk.SamplingTensors.create(temperature=1.0, top_k=3, batch_size=16)
    before = sk.nucleus(rows, params, backend=native)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush denormals")
        flushed = sk.nucleus(rows, params, backend=native)
    finally:
        torch.set_flush_denormal(False)
    for got, expected in zip(flushed, before, strict=True):
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert (before.cutoff.view(torch.int32) == 64).all()
