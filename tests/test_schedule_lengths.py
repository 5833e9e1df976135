"""`schedule_lengths`: parity, order, and that what it chooses keeps verification exact."""

import pytest
import torch

import python_ref
import specdec_kernels as sk
from tests.cases import generator
from tests.enumeration import TOLERANCE, World, completed, marginal, real_step, text_law, total_variation, world


@pytest.mark.parametrize("B", [1, 3, 40])
@pytest.mark.parametrize("K", [1, 7, 16])
def test_parity(B, K, backend):
    for seed in range(12) if backend != "triton" or B * K < 50 else (1, 3, 5):
        g = generator("schedule", B, K, seed)
        c = torch.rand(B, K, generator=g) ** 0.3
        if seed % 3 == 1:  # saturated: many equal survivals
            c = torch.where(c > 0.6, 1.0, (c * 4).round() / 4)
        if seed % 4 == 3:
            c[torch.rand(B, K, generator=g) < 0.1] = torch.nan
            c = c * 2 - 0.2
        count = torch.randint(-1, K + 3, (B,), generator=g) if seed % 2 else None
        tokens = B * (K + 1) + 1 if seed % 5 else B + 3
        curve = 1 / (1 + 0.02 * torch.arange(tokens).float() + 0.3 * torch.rand(tokens, generator=g) * (seed % 3))
        for given in ({"steps_per_second": curve}, {"budget": int(torch.randint(B * K + 2, (1,), generator=g))}):
            want = python_ref.schedule_lengths(c, count, **given)
            got = sk.schedule_lengths(c, count, backend=backend, **given)
            assert torch.equal(got, want), (seed, given)
            out = torch.full((B,), 99, dtype=torch.int32)
            assert sk.schedule_lengths(c, count, out=out, backend=backend, **given) is out and torch.equal(out, want)


def test_more_than_a_sort_holds(compiled):
    """Triton sorts 4,096 drafts in one program, and leaves more to torch."""
    c = torch.rand(700, 7, generator=generator("many"))
    curve = 1 / (1 + 0.001 * torch.arange(6000).float())
    for rows in (585, 700):
        for given in ({"steps_per_second": curve}, {"budget": 1234}):
            got = sk.schedule_lengths(c[:rows], backend=compiled, **given)
            assert torch.equal(got, sk.schedule_lengths(c[:rows], backend="eager", **given))
            assert 0 < int(got.sum()) < got.numel() * 7


def test_stops_at_the_first_that_does_not_gain(backend):
    """Steps per second (1, .5, .45) at 1, 2, 3 tokens: the first draft does not pay, so the second is not looked at."""
    curve = torch.tensor([9.0, 1.0, 0.5, 0.45])
    for second in (0.9, 0.0):
        got = sk.schedule_lengths(torch.tensor([[0.8, second]]), steps_per_second=curve, backend=backend)
        assert got.tolist() == [0]


def test_small_survivals_do_not_depend_on_the_order_of_sums(backend):
    """Under a flat curve every survival counts, down to 2^-40, whatever it is added to."""
    x = torch.tensor([[2**-30 * (1 + 2**-23), 2**-9], [2**-41, 1.0]])
    for rows, want in ((x[:1], [2]), (x[1:], [0]), (x, [2, 0])):
        assert sk.schedule_lengths(rows, steps_per_second=torch.ones(9), backend=backend).tolist() == want
        assert python_ref.schedule_lengths(rows, steps_per_second=torch.ones(9)).tolist() == want


def test_saturated_confidences_come_in_order(backend):
    """Confidences of 1 make equal survivals: offset by offset, then request by request."""
    c = torch.ones(3, 4)
    assert [sk.schedule_lengths(c, budget=n, backend=backend).tolist() for n in (1, 4, 7, 12, 99)] == [
        [1, 0, 0], [2, 1, 1], [3, 2, 2], [4, 4, 4], [4, 4, 4],
    ]  # fmt: skip


# --- exactness ----------------------------------------------------------------------------------------------------------

CURVE = torch.tensor([9.0, 1.0, 0.62, 0.45, 0.40, 0.38])


def confidences(w, drafts):
    """What a drafter would say: the overlap of p and q before each draft, so it depends on the drafts before."""
    return [sum(map(min, w.p(tuple(drafts[:i])), w.q(tuple(drafts[:i])))) for i in range(w.d)]


def scheduled(w, **given):
    def length_of(drafts):
        return int(sk.schedule_lengths(torch.tensor([confidences(w, drafts)]), backend="eager", **given))

    return length_of


@pytest.mark.parametrize("rule", ["token", "block"])
def test_lengths_chosen_on_the_way_are_exact(rule):
    """Scheduled lengths that differ from draft to draft, and the same law as ever. real_step cuts drafts that were drawn at
    full length, which is what a server does."""
    lengths = set()
    for seed in range(4):
        w = world(3, 400 + seed, d=3)
        for given in ({"steps_per_second": CURVE}, {"budget": 2}):
            choose = scheduled(w, **given)
            lengths |= {choose(drafts) for drafts in [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]}
            law = completed(real_step([w], rule=rule, length_of=choose), w.p, 4)
            assert total_variation(law, text_law(w.p, 4)) < TOLERANCE
    assert len(lengths) > 2


def anticipating(confidence, curve):
    """The arg-max over all numbers of drafts, which is not offered."""
    tau, survives, best, length = 1.0, 1.0, float(curve[1]), 0
    for n, c in enumerate(confidence, 1):
        survives *= c
        tau += survives
        if tau * float(curve[1 + n]) > best:
            best, length = tau * float(curve[1 + n]), n
    return length


def test_length_peeks():
    """DSpark, appendix A: the arg-max variant verifies two drafts after A and none after B, and gives (.85, .15)."""
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64).log(), torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    w = World(lambda context: p, lambda context: q, d=2)
    curve = torch.tensor([9.0, 1.0, 0.5, 0.45])
    told = lambda drafts: [0.8, 0.9 if drafts[0] == 0 else 0.0]  # noqa: E731
    peeking = real_step([w], length_of=lambda drafts: anticipating(told(drafts), curve))
    assert marginal(peeking, lambda o: o[0][0]) == pytest.approx({0: 0.85, 1: 0.15}, abs=TOLERANCE)

    def ours(drafts):
        return int(sk.schedule_lengths(torch.tensor([told(drafts)]), steps_per_second=curve, backend="eager"))

    assert marginal(real_step([w], length_of=ours), lambda o: o[0][0]) == pytest.approx({0: 0.7, 1: 0.3}, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps_per_second must be given, or budget instead of it, got neither"),
        ({"budget": 1, "steps_per_second": torch.ones(3)}, "got both"),
        ({"budget": -1}, "budget must be an int >= 0, below 2\\^63, got int -1"),
        ({"budget": 1 << 63}, "budget must be an int >= 0, below 2\\^63, got int 92233"),
        ({"budget": True}, "budget must be an int >= 0"),
        ({"confidence": torch.ones(3), "budget": 1}, r"confidence must be float32 \[B, K\], got float32 \[3\]"),
        ({"num_draft": torch.ones(3).int(), "budget": 1}, r"num_draft must be int32 or int64 \[B=2\]"),
        ({"steps_per_second": torch.ones(0)}, r"steps_per_second must be float32 \[T>=1\]"),
        ({"budget": 1, "out": torch.zeros(2)}, r"out must be int32 \[2\]"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        sk.schedule_lengths(**{"confidence": torch.ones(2, 3), **arguments})
