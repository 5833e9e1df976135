"""The oracle's filters against set definitions by brute force (`tests.enumeration.filtered_probs`) and named cases."""

import itertools
import math

import pytest
import torch

from python_ref import SamplingParams, filter_probs, nucleus, row_nucleus, row_probs, sample
from python_ref.params import STATUS_EMPTY_ROW, STATUS_NAN, RowParams
from tests.enumeration import filtered_probs

INF, NAN = math.inf, math.nan
ORDERS = ("hf", "vllm", "joint")
TEMPERATURES = (0.0, 9.9e-6, 1e-5, 1e-3, 0.5, 1.0, 3.0, 1e4, 1e38, INF)
TOP_P = (-1.0, 0.0, 1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0, 2.0)
TOP_K = (-1, 0, 1, 2, 3, 5, 10**6)
MIN_P = (-0.1, 0.0, 1e-6, 0.05, 0.3, 1.0, 1.5)


def row_params(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> RowParams:
    return RowParams(temperature, top_p, top_k, min_p, 0)


def probs(row, order="hf", **filters) -> list[float]:
    row, params = torch.as_tensor(row, dtype=torch.float64), row_params(**filters)
    return row_probs(row, row_nucleus(row, params, order), params).tolist()


def kept(row, order="hf", **filters) -> set[int]:
    return {v for v, p in enumerate(probs(row, order, **filters)) if p > 0}


def logits_of(p) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


def adversarial_rows():
    generator = torch.Generator().manual_seed(0)
    normal = lambda n, scale: torch.randn(n, generator=generator) * scale  # noqa: E731
    for n, scale in itertools.product((1, 2, 3, 7, 33), (0.0, 0.3, 2.0, 30.0)):
        yield "normal", normal(n, scale)
        yield "bf16", normal(n, scale).bfloat16()
        yield "f16_ties", (normal(n, scale) * 2).round().half() / 2
    for special in ([INF], [-INF], [NAN], [INF, INF, NAN], [-INF, NAN, 3e38, -3e38], [1e-40, 0.0, -0.0, -1e-40]):
        for at in range(2):
            row = normal(9, 2.0)
            row[at : at + len(special)] = torch.tensor(special)
            yield "special", row
    yield "all_masked", torch.full((5,), -INF)
    yield "all_nan", torch.full((5,), NAN)
    yield "all_inf", torch.full((5,), INF)
    yield "one_left", torch.tensor([-INF, -INF, -7.5, -INF])
    yield "shifted", normal(9, 1.0) + 1e4


@pytest.mark.parametrize("order", ORDERS)
def test_filters_equal_their_set_definitions(order):
    """Same support and same probabilities to 1e-12 on adversarial rows x random parameters, except where a mass meets its
    threshold to rounding; those are counted."""
    generator = torch.Generator().manual_seed(ORDERS.index(order))
    pick = lambda choices: choices[int(torch.randint(len(choices), (), generator=generator))]  # noqa: E731
    on_the_edge, compared = 0, 0
    for name, row in adversarial_rows():
        for _ in range(12):
            filters = {
                "temperature": pick(TEMPERATURES),
                "top_p": pick(TOP_P),
                "top_k": pick(TOP_K),
                "min_p": pick(MIN_P),
            }
            params = row_params(**filters)
            nuc = row_nucleus(row, params, order)
            if nuc.margin < 1e-13:
                on_the_edge += 1
                continue
            expected = torch.tensor(filtered_probs(row.tolist(), order=order, **filters), dtype=torch.float64)
            got = row_probs(row, nuc, params)
            assert torch.equal(got > 0, expected > 0), (name, filters, row)
            assert torch.allclose(got, expected, rtol=1e-12, atol=0), (name, filters, row)
            empty = not expected.any()
            assert abs(float(got.sum()) - (0 if empty else 1)) < 1e-12
            assert nuc.status == (STATUS_EMPTY_ROW if empty else 0) | (STATUS_NAN if row.isnan().any() else 0)
            compared += 1
    assert compared > 800
    assert on_the_edge <= 0.05 * compared


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1e4])
@pytest.mark.parametrize("order", ORDERS)
def test_three_numbers_are_the_definition(order, temperature):
    """cutoff is the smallest kept logit, row_max the largest, log_mass the log of the kept mass relative to the maximum."""
    row = torch.tensor([0.25, 3.0, 3.0, 2.5, -1.0, 2.5, 2.0, -INF], dtype=torch.float64)
    filters = {"temperature": temperature, "top_k": 4, "top_p": 0.95, "min_p": 0.01}
    nuc = row_nucleus(row, row_params(**filters), order)
    support = [row[v].item() for v in kept(row, order, **filters)]
    assert nuc.cutoff == min(support)
    assert nuc.row_max == 3.0
    assert nuc.log_mass == pytest.approx(
        math.log(math.fsum(math.exp((z - 3.0) / temperature) for z in support)), abs=1e-14
    )


@pytest.mark.parametrize(
    ("p", "top_p", "expected"),
    [
        # The rule "keep every value >= t, t the largest threshold of mass >= p". Where sort order would split equal
        # values, all are kept (ties_cut); where the mass meets p, the token that meets it is kept (kept_mass_short).
        pytest.param([0.4, 0.3, 0.3], 0.5, {0, 1, 2}, id="tie_at_the_cutoff"),
        pytest.param([0.25] * 4, 0.5, {0, 1, 2, 3}, id="all_tied"),
        pytest.param([0.5, 0.25, 0.25], 0.75, {0, 1, 2}, id="tie_where_one_would_do"),
        pytest.param([0.7, 0.2, 0.1], 0.0, {0}, id="top_p_zero"),
        pytest.param([0.2, 0.4, 0.4], 0.0, {1, 2}, id="top_p_zero_keeps_tied_maxima"),
        pytest.param([0.7, 0.2, 0.1], -0.5, {0}, id="top_p_negative"),
        pytest.param([0.5, 0.5 - 1e-8, 1e-8, 0.0], 1.0, {0, 1, 2}, id="top_p_one_not_noop"),
        pytest.param([0.5, 0.5 - 1e-8, 1e-8, 0.0], 1.5, {0, 1, 2}, id="top_p_above_one"),
        pytest.param([0.6, 0.3, 0.1], 0.65, {0, 1}, id="kept_mass_short"),
    ],
)
def test_top_p_boundaries(p, top_p, expected):
    for order in ORDERS:
        assert kept(logits_of(p), order, top_p=top_p) == expected


def test_mass_that_meets_p_exactly_is_enough():
    """At a huge temperature four distinct logits weigh exactly 1 each: two of them are exactly p = 0.5 of the mass."""
    for order in ORDERS:
        assert kept([3.0, 1.0, 2.0, 0.0], order, top_p=0.5, temperature=1e30) == {0, 2}


EIGHT = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05]


@pytest.mark.parametrize(
    ("order", "filters", "size"),
    [
        pytest.param("hf", {"top_k": 3, "top_p": 0.6}, 2, id="hf_renormalises_after_top_k"),
        pytest.param("vllm", {"top_k": 3, "top_p": 0.6}, 2, id="vllm_renormalises_after_top_k"),
        pytest.param("joint", {"top_k": 3, "top_p": 0.6}, 3, id="joint_does_not"),
        pytest.param("hf", {"min_p": 0.6, "top_p": 0.55}, 2, id="hf_min_p_after_top_p"),
        pytest.param("vllm", {"min_p": 0.6, "top_p": 0.55}, 1, id="vllm_min_p_before_top_p"),
        pytest.param("joint", {"min_p": 0.6, "top_p": 0.55}, 2, id="joint_min_p"),
        pytest.param("hf", {"top_k": 4}, 5, id="top_k_keeps_ties"),
        pytest.param("hf", {"top_k": 8}, 8, id="top_k_equal_v_is_off"),
        pytest.param("hf", {"top_k": -1}, 8, id="top_k_negative_is_off"),
        pytest.param("hf", {"min_p": 1.0}, 1, id="min_p_one_keeps_the_maxima"),
        pytest.param("hf", {"min_p": 7.0}, 1, id="min_p_above_one_keeps_the_maxima"),
        pytest.param("hf", {"min_p": -1.0}, 8, id="min_p_negative_is_off"),
    ],
)
def test_filter_orders(order, filters, size):
    """`spec_nonspec_mismatch` starts here: the orders keep different sets."""
    assert len(kept(logits_of(EIGHT), order, **filters)) == size


def test_no_filter_is_an_exact_noop():
    row = torch.randn(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 8
    off = row_nucleus(row, row_params(top_p=1.0, top_k=64, min_p=0.0))
    assert off.cutoff == -INF
    assert off.margin == INF
    assert torch.allclose(torch.tensor(probs(row), dtype=torch.float64), torch.softmax(row, 0), rtol=1e-12, atol=0)


def test_greedy_sentinel_division():
    """Temperatures below 1e-5, -1 and NaN take the lowest maximum and never divide; 1e-5 itself samples."""
    row = [1.0, 5.0, 5.0, NAN]
    for temperature in (0.0, 1e-30, 9.99e-6, -1.0, NAN):
        assert probs(row, temperature=temperature) == [0.0, 1.0, 0.0, 0.0]
        nuc = row_nucleus(torch.tensor(row), row_params(temperature, top_k=2, top_p=0.1))
        assert nuc[:4] == (5.0, 5.0, 0.0, STATUS_NAN)
    assert probs(row, temperature=1e-5) == [0.0, 0.5, 0.5, 0.0]


def test_unknown_order_is_refused():
    with pytest.raises(ValueError, match="filter_order"):
        row_nucleus(torch.zeros(2), row_params(), "HF")


# --- margins -----------------------------------------------------------------------------------------------------------


def last_group(weights, counts, params, order) -> int:
    """Index of the last kept value given masses of the distinct values in descending order (brute force, in sums)."""
    n = len(weights)
    k = next((i for i in range(n) if sum(counts[: i + 1]) >= params.top_k), n - 1) if params.top_k > 0 else n - 1
    per_token = [w / c for w, c in zip(weights, counts, strict=True)]
    m = max(i for i in range(n) if params.min_p <= 0 or per_token[i] >= params.min_p * per_token[0])
    base = {"hf": k, "vllm": min(k, m), "joint": n - 1}[order]
    if params.top_p >= 1:
        return min(k, m)
    goal = params.top_p * math.fsum(weights[: base + 1])
    t = next((i for i in range(n) if math.fsum(weights[: i + 1]) >= goal), n - 1)
    return min(k, m, t, base if order == "vllm" else n - 1)


@pytest.mark.parametrize("order", ORDERS)
def test_errors_below_the_margin_never_move_the_cutoff(order):
    """Masses off by less than the margin (in their logarithms), in random and in the worst directions (all up to the cutoff one way, the rest the
    other way). The maximum stays: its weight is 1 by definition."""
    generator = torch.Generator().manual_seed(5)
    checked = 0
    for trial in range(150):
        row = (torch.randn(9, generator=generator, dtype=torch.float64) * 4).round() / 2
        pick = lambda values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
        params = row_params(pick((0.7, 1.0, 2.0)), pick((0.2, 0.5, 0.9)), pick((0, 3, 5)), pick((0.0, 0.07, 0.3)))
        nuc = row_nucleus(row, params, order)
        if not 0 < nuc.margin < 0.5:
            continue
        values, counts = row.unique(return_counts=True)
        values, counts = values.flip(0), counts.flip(0).tolist()
        weights = ((values - values[0]) / params.temperature).exp()
        masses = (weights * torch.tensor(counts)).tolist()
        end = values.tolist().index(nuc.cutoff)
        assert last_group(masses, counts, params, order) == end
        n = len(masses)
        patterns = [[1 if i < split else -1 for i in range(n)] for split in range(n + 1)]
        patterns += (2 * torch.rand(10, n, generator=generator, dtype=torch.float64) - 1).tolist()
        for pattern, sign in itertools.product(patterns, (1, -1)):
            errors = [0.0] + [0.99 * nuc.margin * sign * s for s in pattern[1:]]
            off = [m * math.exp(e) for m, e in zip(masses, errors, strict=True)]
            assert last_group(off, counts, params, order) == end, (trial, row, params, nuc.margin)
        checked += 1
    assert checked > 80


def test_margin_is_not_smaller_than_it_must_be():
    """Just beyond the margin (as a share of the total mass) another top_p does move the cutoff."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        row = torch.randn(9, generator=generator, dtype=torch.float64) * 2
        nuc = row_nucleus(row, row_params(top_p=0.6))
        moved = [row_nucleus(row, row_params(top_p=0.6 + s * 1.01 * nuc.margin)).cutoff != nuc.cutoff for s in (1, -1)]
        assert any(moved)
        assert all(
            row_nucleus(row, row_params(top_p=0.6 + s * 0.99 * nuc.margin)).cutoff == nuc.cutoff for s in (1, -1)
        )


# --- batches -----------------------------------------------------------------------------------------------------------


def test_rows_and_slots_choose_the_parameters():
    """slot_dependent, parameter_ignored: row -> request -> slot; `nucleus`, `filter_probs` and `sample` read the same."""
    states = SamplingParams(
        torch.tensor([1.0, 0.5, 0.0]),
        torch.tensor([1.0, 0.7, 1.0]),
        torch.tensor([0, 0, 0], dtype=torch.int32),
        torch.tensor([0.3, 0.0, 0.0]),
        torch.tensor([1, 2, 3]),
        slots=torch.tensor([2, 0, 1]),
    )
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rows = torch.tensor([2, 0, 1, 2])
    expected_filters = [
        {"temperature": 0.5, "top_p": float(torch.tensor(0.7))},
        {"temperature": 0.0},
        {"min_p": float(torch.tensor(0.3))},
        {"temperature": 0.5, "top_p": float(torch.tensor(0.7))},
    ]
    expected = torch.tensor([filtered_probs(z, **f) for z, f in zip(logits.tolist(), expected_filters, strict=True)])
    assert torch.allclose(filter_probs(logits, states, rows=rows), expected.double(), atol=1e-12)
    result, sampled = nucleus(logits, states, rows=rows), sample(logits, states, torch.arange(4), rows=rows)
    for a, b in zip(result.nucleus, sampled.nucleus, strict=True):
        assert torch.equal(a, b)
    assert all(expected[n, token] > 0 for n, token in enumerate(sampled.tokens.tolist()))
    assert torch.allclose(sampled.logprobs, expected.double().gather(1, sampled.tokens[:, None].long())[:, 0].log())


def test_empty_batch():
    params = SamplingParams(*(torch.zeros(0) for _ in range(5)))
    assert nucleus(torch.zeros(0, 5), params).status.shape == (0,)
    assert filter_probs(torch.zeros(0, 5), params).shape == (0, 5)
    assert sample(torch.zeros(0, 5), params).tokens.shape == (0,)
