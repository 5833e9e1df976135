"""The oracle's verification rules against exact enumeration: the joint law of (emitted tokens, accepted count) of one step,
texts over several steps, and what licenses calling steps independent: no random key is read twice."""

import importlib
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from python_ref import rng, sample, verify_chain
from python_ref.rows import accept_probability, accepts, residual
from python_ref.verify_chain import chain_law
from tests.enumeration import (
    TOLERANCE,
    KeyRecorder,
    Table,
    World,
    chain_law_of,
    chain_step_law,
    completed,
    draft_law,
    make_params,
    marginal,
    product_law,
    real_step,
    steps_law,
    text_law,
    total_variation,
    world,
)

ROWS_MODULE = importlib.import_module("python_ref.rows")
VISIBLE_BIAS = 1e-2
"""Negative controls must miss by at least this much."""

FILTERS = {"temperature": 0.8, "top_k": 3, "top_p": 0.8, "min_p": 0.1}
# Rows whose kept set depends on the filter order: hf 2 tokens, vllm 1, joint 2 at first; then 2, 2, 3.
ORDER_FILTERS = {"top_k": 3, "top_p": 0.5, "min_p": 0.7}
ORDER_ROWS = torch.tensor([[0.3, 0.25, 0.2, 0.125, 0.125], [0.24, 0.22, 0.2, 0.18, 0.16]], dtype=torch.float64).log()


def order_rows(context):
    return ORDER_ROWS[min(len(context), 1)]


STEPS = {
    "stochastic": world(d=3),
    "no_drafts": world(d=0),
    "two_tokens": world(2, 1, d=3),
    "p_equals_q": World(Table(3, 5), Table(3, 5), d=2),  # zero_residual
    "deterministic": world(3, 2, d=3, q_form="none"),
    "deterministic_as_greedy_logits": world(3, 2, d=3, draft_filters={"temperature": 0.0}),
    "greedy_target": world(3, 3, filters={"temperature": 0.0}),
    "p_top_k": world(4, 4, filters={"top_k": 2}),
    "p_top_p": world(4, 4, filters={"top_p": 0.7}),
    "p_min_p": world(4, 4, filters={"min_p": 0.4}),
    "p_and_q_filtered": world(4, 5, filters=FILTERS, draft_filters=FILTERS),
    "only_q_filtered": world(4, 6, draft_filters=FILTERS),
    "ties": world(4, 7, steps=1, filters=FILTERS, draft_filters=FILTERS),
    "saved_nucleus": world(4, 10, filters=FILTERS, draft_filters={"temperature": 1.5, "top_k": 2}, q_form="nucleus"),
    "q_as_probs": world(3, 11, draft_filters={"temperature": 0.5}, q_form="probs"),
    "reduced_vocabulary": world(4, 12, draft_vocab=2, target_to_draft=[1, -1, 0, -1], filters={"top_p": 0.9}),
    "no_bonus": world(3, 13, emit_bonus=False),
    "lengths_by_prefix": world(3, 14, d=3, goes_on=lambda context: sum(context) % 3 != 1),
}
for kind in ("placeholder", "too_large", "zero_q", "nan_row", "empty_row"):
    STEPS[f"{kind}_after_token_0"] = world(
        3, 15, d=3, mishap=lambda context, kind=kind: kind if context[-1:] == (0,) else None
    )
for order in ("hf", "vllm", "joint"):
    STEPS[f"p_filtered_{order}"] = World(order_rows, Table(5, 1), filters=ORDER_FILTERS, order=order)
    STEPS[f"q_filtered_{order}"] = World(Table(5, 1), order_rows, draft_filters=ORDER_FILTERS, order=order)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", STEPS)
def test_one_step_joint_law_is_exact(name, rule):
    w = STEPS[name]
    if rule == "block" and not w.emit_bonus:
        pytest.skip("refused")
    real = real_step([w], rule=rule)
    exact = w.exact(rule=rule)
    assert math.isclose(math.fsum(real.values()), 1, abs_tol=TOLERANCE)
    assert total_variation(real, exact) < TOLERANCE
    assert total_variation(completed(real, w.p, w.d + 1), text_law(w.p, w.d + 1)) < TOLERANCE
    if not name.endswith("_after_token_0"):  # `chain_law`, the piece that others can enumerate, is what the step does
        law_of = chain_law_of(w, rule=partial(chain_law, rule=rule if w.stochastic else "token"))
        pieces = chain_step_law(law_of, draft_law(w.q, w.d, (), w.usable(())), w.emit_bonus)
        assert total_variation(pieces, exact) < TOLERANCE


@pytest.mark.parametrize(
    ("q", "draft"),
    [
        pytest.param(None, 0, id="unusable_row"),
        pytest.param([0.5, 0.5], -1, id="placeholder"),
        pytest.param([0.5, 0.5], 2, id="too_large"),
        pytest.param([0.0, 1.0], 0, id="zero_q"),
        pytest.param([math.nan, 1.0], 0, id="nan_q"),
    ],
)
def test_chain_law_of_an_unusable_draft(q, draft):
    """Never accepted, and its row emits from p."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    law = chain_law([p, p.flip(0)], [q if q is None else torch.tensor(q, dtype=torch.float64)], [draft])
    assert law.accept == [0.0]
    assert torch.allclose(law.emit[0], p)
    assert torch.allclose(law.emit[1], p.flip(0))


def test_mixed_batch_is_a_product_of_exact_laws():
    batch = [
        world(2, 20, d=0),
        world(2, 21, d=2, draft_filters={"temperature": 2.0}),
        world(2, 22, d=1, filters={"temperature": 0.0}),
        world(2, 23, d=2, filters={"top_p": 0.6}, mishap=lambda context: "placeholder" if len(context) == 1 else None),
    ]
    assert total_variation(real_step(batch), product_law([w.exact() for w in batch])) < TOLERANCE


@pytest.mark.parametrize("order", ["hf", "vllm", "joint"])
def test_coupled_step_is_exact_for_any_drafter(order):
    w = world(3, 30, filters=FILTERS, order=order, mishap=lambda context: "placeholder" if context == (0,) else None)
    assert total_variation(completed(real_step([w], rule="coupled"), w.p, 3), text_law(w.p, 3)) < TOLERANCE


# --- controls that must fail -------------------------------------------------------------------------------------------


def with_emission(of):
    """`chain_law` that emits `of(p_i, q_i)`, normalised, at a rejected row."""

    def rule(p, q, drafts):
        law = chain_law(p, q, drafts)
        emit = [of(p_i, q_i) for p_i, q_i in zip(p, q, strict=False)]
        return law._replace(emit=[e / e.sum() for e in emit] + law.emit[-1:])

    return rule


def shifted_rows(p, q, drafts):
    return chain_law(p[1:] + p[:1], q, drafts)


def capped_ratio_of_q(p, q, drafts):
    accept = [accept_probability(float(q_i[x]), float(p_i[x])) for p_i, q_i, x in zip(p, q, drafts, strict=False)]
    count = [math.prod(accept[:i]) * (1 - a) for i, a in enumerate([*accept, 0.0])]
    return chain_law(p, q, drafts)._replace(count=count)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(with_emission(lambda p, q: (p - q).abs()), id="residual_not_clamped"),
        pytest.param(with_emission(lambda p, q: p), id="rejection_emits_p"),
        pytest.param(shifted_rows, id="row_off_by_one"),
        pytest.param(capped_ratio_of_q, id="ratio_upside_down"),
    ],
)
def test_control_wrong_pieces_are_seen(rule):
    w = STEPS["stochastic"]
    law = chain_step_law(chain_law_of(w, rule=rule), draft_law(w.q, w.d))
    assert total_variation(completed(law, w.p, w.d + 1), text_law(w.p, w.d + 1)) > VISIBLE_BIAS


def test_control_wrong_residual_inside_verify_chain_is_seen():
    w = STEPS["stochastic"]
    right = ROWS_MODULE.race_signed
    with patch.object(ROWS_MODULE, "race_signed", lambda signed, *rest: right(signed.abs(), *rest)):
        assert total_variation(completed(real_step([w]), w.p, w.d + 1), text_law(w.p, w.d + 1)) > VISIBLE_BIAS


def test_control_mask_not_prefix_is_seen():
    """Acceptances after the first rejection count: as many drafts are emitted as were accepted anywhere."""
    w = world(3, 40)
    law_of, law = chain_law_of(w), {}
    for drafts, weight in draft_law(w.q, 2).items():
        (a, b), emit, _ = law_of(drafts)
        for count, chance in enumerate([(1 - a) * (1 - b), a * (1 - b) + (1 - a) * b, a * b]):
            for y, e in enumerate(emit[count].tolist()):
                key = ((*drafts[:count], y), count)
                law[key] = law.get(key, 0.0) + weight * chance * e
    assert total_variation(completed(law, w.p, 3), text_law(w.p, 3)) > VISIBLE_BIAS


@pytest.mark.parametrize(
    ("drawn_with", "claimed"),
    [
        pytest.param({"top_p": 0.6}, {}, id="filters_left_out"),
        pytest.param({}, {"temperature": 0.7}, id="another_temperature"),
        pytest.param({"temperature": 0.0}, {}, id="wrong_q_for_greedy_drafts"),
    ],
)
def test_control_guessed_q_is_seen(drawn_with, claimed):
    w = world(4, 41, d=1, draft_filters=drawn_with)
    law = chain_step_law(chain_law_of(replace(w, draft_filters=claimed)), draft_law(w.q, 1))
    assert total_variation(completed(law, w.p, 2), text_law(w.p, 2)) > VISIBLE_BIAS


def test_q_guessed_with_too_many_filters_is_still_exact():
    """Drafts drawn with the temperature alone, q rebuilt with the target's filters: given that a draft lies inside the
    filtered q it follows the filtered q, and outside it the row emits from p. Only the acceptance suffers."""
    w = world(4, 41, filters={"top_p": 0.6})
    claimed = replace(w, draft_filters={"top_p": 0.6})
    law = chain_step_law(chain_law_of(claimed), draft_law(w.q, 2))
    assert total_variation(completed(law, w.p, 3), text_law(w.p, 3)) < TOLERANCE


def test_control_zero_q_must_not_emit_the_residual():
    """A drafter that now and then proposes token 0, which its q rules out: p is right there and (p - q)+ is biased."""
    w = world(3, 42, d=1, draft_filters={"top_k": 1})
    q = torch.tensor(w.q(()))
    outside = int(q.argmin())
    assert q[outside] == 0
    drafts = {drafted: 0.7 * weight for drafted, weight in draft_law(w.q, 1).items()} | {(outside,): 0.3}
    right = chain_step_law(chain_law_of(w), drafts)
    wrong = chain_step_law(chain_law_of(w, rule=with_emission(residual)), drafts)
    assert total_variation(completed(right, w.p, 2), text_law(w.p, 2)) < TOLERANCE
    assert total_variation(completed(wrong, w.p, 2), text_law(w.p, 2)) > VISIBLE_BIAS


def test_length_peeks():
    """DSpark, appendix A: verifying two drafts after A and none after B gives (.85, .15) instead of (.7, .3). Stopping
    after the first draft by what was known before it is exact."""
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64).log(), torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    w = World(lambda context: p, lambda context: q, d=2)
    peeking = marginal(real_step([w], length_of=lambda drafts: 2 if drafts[0] == 0 else 0), lambda o: o[0][0])
    assert peeking == pytest.approx({0: 0.85, 1: 0.15}, abs=TOLERANCE)
    stopping = replace(w, goes_on=lambda context: context[:1] != (1,))
    assert marginal(real_step([stopping]), lambda o: o[0][0]) == pytest.approx({0: 0.7, 1: 0.3}, abs=TOLERANCE)


# --- several steps -----------------------------------------------------------------------------------------------------


def drafts_wanted(context) -> bool:
    return (len(context) * 7 + sum(context)) % 4 != 3


@pytest.mark.parametrize(
    ("w", "length"),
    [
        pytest.param(world(2, 50, d=1), 5, id="one_draft_five_tokens"),
        pytest.param(world(3, 51, d=2), 4, id="three_tokens_two_drafts"),
        pytest.param(world(2, 52, d=2, goes_on=drafts_wanted, filters={"top_p": 0.8}), 5, id="filtered_ragged"),
        pytest.param(world(2, 53, d=2, q_form="none"), 5, id="deterministic"),
    ],
)
def test_texts_over_several_steps_are_exact(w, length):
    real = steps_law(lambda prefix: marginal(real_step([w], prefix), lambda o: o[0]), length)
    exact = steps_law(lambda prefix: marginal(w.exact(prefix), lambda o: o[0]), length)
    assert sum(weight for (_, steps), weight in real.items() if steps >= 3) > 0.3
    assert total_variation(real, exact) < TOLERANCE
    assert total_variation(marginal(real, lambda o: o[0]), text_law(w.p, length)) < TOLERANCE


def decode(steps: int, propose, rule="token", seeds=(3, -4), vocab=5, d=3, filters=None, advance=True) -> tuple:
    """`steps` real steps of a batch; `propose(b, draft row, anchor, j, target row)` draws a draft. Returns the texts and
    the accepted counts seen."""
    filters = filters or {}
    worlds = [world(vocab, 60 + b, filters=filters, d=d) for b in range(len(seeds))]
    params, texts, counts = make_params([filters] * len(seeds), seeds), [[] for _ in seeds], set()
    for step in range(steps):
        drafts, q_rows, p_rows, lengths = [], [], [], []
        for b, w in enumerate(worlds):
            context = tuple(texts[b])
            lengths.append((step + b) % (d + 1) if step % 2 else d)
            for j in range(lengths[-1]):
                p_rows.append(w.target(context)), q_rows.append(w.draft(context))
                drafts.append(propose(b, q_rows[-1], len(texts[b]) if advance else 0, j, p_rows[-1]))
                context = (*context, drafts[-1])
            p_rows.append(w.target(context))
        out = verify_chain(
            torch.stack(p_rows),
            torch.tensor(drafts, dtype=torch.int64),
            torch.tensor([0, *np.cumsum(lengths)]),
            params,
            torch.tensor([len(t) if advance else 0 for t in texts]),
            draft_logits=torch.stack(q_rows),
            draft_params=make_params([{}] * len(seeds)),
            rule=rule,
        )
        counts |= set(out.num_accepted.tolist())
        for b, text in enumerate(texts):
            text.extend(out.tokens[b, : out.num_emitted[b]].tolist())
    return texts, counts


def draft_with(stream, position_of, id_of, seeds=(3, -4)):
    def propose(b, row, anchor, j, _):
        params = make_params([{}], [seeds[b]])
        position, ids = torch.tensor([position_of(anchor, j)]), torch.tensor([id_of(j)])
        return int(sample(row[None], params, position, stream=stream, ids=ids).tokens)

    return propose


BY_ANCHOR = draft_with(rng.STREAM_DRAFT, lambda anchor, j: anchor, lambda j: j)


def test_no_random_key_is_read_twice():
    """Over many steps with every accepted count, every draw of drafter and verifier has a key of its own, so steps are
    independent given the text and the exact one-step laws multiply."""
    with patch.object(rng, "words", recorder := KeyRecorder()):
        _, counts = decode(24, BY_ANCHOR)
    assert counts == {0, 1, 2, 3}
    assert {key[2] for key in recorder.reads} == {0, 1, 2}
    assert max(recorder.reads.values()) == 1


@pytest.mark.parametrize(
    ("propose", "wrong", "advance"),
    [
        pytest.param(BY_ANCHOR, {"STREAM_ACCEPT": rng.STREAM_SAMPLE}, True, id="coin_on_the_residual_stream"),
        pytest.param(BY_ANCHOR, {"STREAM_ACCEPT": rng.STREAM_DRAFT}, True, id="coin_on_the_draft_stream"),
        pytest.param(draft_with(2, lambda anchor, j: anchor + j, lambda j: 0), {}, True, id="shared_noise"),
        pytest.param(draft_with(0, lambda anchor, j: anchor + j, lambda j: 0), {}, True, id="noise_reused_next_step"),
        pytest.param(draft_with(0, lambda anchor, j: anchor, lambda j: 0), {}, True, id="draft_offset_left_out"),
        pytest.param(BY_ANCHOR, {}, False, id="position_stands_still"),
    ],
)
def test_control_reused_keys_are_seen(propose, wrong, advance):
    with patch.multiple(rng, words=(recorder := KeyRecorder()), **wrong):
        decode(6, propose, advance=advance)
    assert max(recorder.reads.values()) > 1


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        pytest.param("same_noise", {0, 1, 2, 3}, id="same_noise"),
        pytest.param("another_stream", {0, 1, 2}, id="another_stream"),
        pytest.param("perfect", {0, 1, 2, 3}, id="perfect"),  # 0 to 2 are steps with fewer drafts
        pytest.param("always_wrong", {0}, id="always_wrong"),
        pytest.param("placeholders", {0}, id="placeholders"),
    ],
)
def test_coupled_text_is_the_plain_text(drafter, expected):
    seeds, vocab, filters = (3, -4), 5, {"temperature": 0.9, "top_p": 0.95}
    params = make_params([filters] * 2, seeds)

    def plain(b, row, position):
        return int(sample(row[None], params, torch.tensor([position]), rows=torch.tensor([b])).tokens)

    def propose(b, row, anchor, j, target_row):
        if drafter == "same_noise":
            return plain(b, row, anchor + j)
        if drafter == "another_stream":
            return BY_ANCHOR(b, row, anchor, j, None)
        right = plain(b, target_row, anchor + j)
        return {"perfect": right, "always_wrong": (right + 1) % vocab}.get(drafter, [-1, vocab, 2**31 - 1][j])

    texts, counts = decode(16, propose, "coupled", seeds, vocab, filters=filters)
    assert counts == expected
    for b, text in enumerate(texts):
        target, alone = world(vocab, 60 + b).target, []
        for position in range(len(text)):
            alone.append(plain(b, target(tuple(alone)), position))
        assert text == alone


# --- real coins and real noise -----------------------------------------------------------------------------------------


def test_accept_set_is_the_interval_below_p_over_q():
    """A coin accepts iff coin < p / q as exact fractions, at the coins next to p / q: the accepted set has the length that
    `accept_probability` says, and `accepts` is what `scripted` integrates."""
    generator = np.random.default_rng(0)
    for p, q in np.sort(generator.random((300, 2)), axis=1).tolist():
        nearest = np.float32(p / q)
        for coin in {
            nearest,
            np.nextafter(nearest, np.float32(0)),
            np.nextafter(nearest, np.float32(1)),
            np.float32(2**-33),
        }:
            assert accepts(float(coin), p, q) == (Fraction(float(coin)) < Fraction(p) / Fraction(q))
        assert accept_probability(p, q) == p / q
    # Powers of two: the product is exact, so is the boundary, and it is outside.
    assert not accepts(0.5, 0.125, 0.25)
    assert accepts(math.nextafter(0.5, 0), 0.125, 0.25)
    assert not accepts(math.nextafter(0.5, 1), 0.125, 0.25)


@pytest.mark.parametrize(
    ("p_x", "q_x", "coin", "accepted"),
    [
        pytest.param(0.0, 0.5, 2.0**-33, 0, id="p_zero_smallest_coin"),
        pytest.param(0.0, 0.5, 0.0, 0, id="p_zero_coin_zero"),
        pytest.param(1e-12, 0.5, 2.0**-33, 0, id="p_below_the_smallest_coin"),
        pytest.param(1e-9, 0.5, 2.0**-33, 1, id="p_above_the_smallest_coin"),
        pytest.param(0.5, 0.5, 1 - 2.0**-24, 1, id="p_equals_q_largest_coin"),
        pytest.param(0.5, 0.5, 1.0, 1, id="p_equals_q_coin_rounded_to_one"),
        pytest.param(0.6, 0.5, 1.0, 1, id="p_above_q_coin_rounded_to_one"),
        pytest.param(0.5 - 2.0**-26, 0.5, 1 - 2.0**-24, 1, id="p_just_below_q_accepts_largest_coin"),
        pytest.param(0.5 - 2.0**-24, 0.5, 1 - 2.0**-24, 0, id="p_below_q_rejects_largest_coin"),
        pytest.param(0.5, 0.0, 2.0**-33, 0, id="zero_q"),
        pytest.param(0.0, 0.0, 2.0**-33, 0, id="both_zero"),
    ],
)
def test_coin_extremes(p_x, q_x, coin, accepted):
    p, q = (torch.tensor([[v, 1 - v]], dtype=torch.float64) for v in (p_x, q_x))
    with patch.object(rng, "coin", lambda *_: coin):
        out = verify_chain(
            None, torch.tensor([0]), torch.tensor([0, 1]), make_params([{}]), target_probs=p.repeat(2, 1), draft_probs=q
        )
    assert out.num_accepted.tolist() == [accepted]


def joint_chi_square(draft_stream: int, requests: int = 20_000) -> tuple[float, int]:
    """Chi-square of (tokens, accepted) of the real `verify_chain` with real keys, one seed per request, against the exact
    law. Only the noise is precomputed: in one Philox call instead of one for each key."""
    w, vocab, d, anchor = world(5, 70, d=2), 5, 2, 11
    keys = [(anchor + i, 2, 0) for i in range(d + 1)] + [(anchor, s, j) for s in (0, 1) for j in range(d)]
    seeds = torch.arange(requests, dtype=torch.int64) * 0x9E3779B97F4A7C15 % 2**62 - 2**61
    counter = torch.tensor([[(i, pos, 0, stream | id << 8) for i in (0, 1)] for pos, stream, id in keys])
    words = rng.philox4x32(counter, torch.stack([seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF], -1)[:, None, None])
    row_of, key_of = {int(s): n for n, s in enumerate(seeds)}, {key: k for k, key in enumerate(keys)}
    table = lambda seed, pos, stream, id, index: words[row_of[seed], key_of[pos, stream, id], : index.numel()]  # noqa: E731
    blocks = torch.arange(2)
    assert all(torch.equal(table(s, *k, blocks), rng.words(s, *k, blocks)) for s in seeds[:2].tolist() for k in keys)

    log_noise = (-torch.log1p(-rng.uniform(words.flatten(-2)))).log()[..., :vocab]
    contexts = [
        c for n in range(d + 1) for c in text_law(lambda _: [1] * vocab, n)
    ]  # numbered: (x, y) is vocab * (x + 1) + y + 1
    p, q = (torch.tensor([row(c) for c in contexts], dtype=torch.float64) for row in (w.p, w.q))
    context, drafts = [torch.zeros(requests, dtype=torch.int64)], []
    for j in range(d):
        key = key_of[(anchor, 0, j) if draft_stream == 0 else (anchor + j, 2, 0)]
        drafts.append((q[context[-1]].log() - log_noise[:, key]).argmax(-1))
        context.append(vocab * context[-1] + drafts[-1] + 1)
    with patch.object(rng, "words", table):
        out = verify_chain(
            None,
            torch.stack(drafts, -1).flatten(),
            torch.arange(requests + 1) * d,
            make_params([{}] * requests, seeds.tolist()),
            torch.full((requests,), anchor),
            target_probs=p[torch.stack(context, -1).flatten()],
            draft_probs=q[torch.stack(context[:-1], -1).flatten()],
        )
    seen = {}
    for tokens, emitted, accepted in zip(
        out.tokens.tolist(), out.num_emitted.tolist(), out.num_accepted.tolist(), strict=True
    ):
        outcome = (tuple(tokens[:emitted]), accepted)
        seen[outcome] = seen.get(outcome, 0) + 1
    expected = {outcome: requests * weight for outcome, weight in w.exact().items()}
    assert seen.keys() <= expected.keys()
    cells = [(seen.get(o, 0), e) for o, e in expected.items() if e >= 5]
    rest = (requests - sum(s for s, _ in cells), requests - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    return sum((s - e) ** 2 / e for s, e in cells), len(cells) - 1


def test_real_noise_gives_the_joint_law():
    statistic, freedom = joint_chi_square(draft_stream=0)
    assert freedom > 50
    assert 1e-3 < chi2.sf(statistic, freedom) < 1 - 1e-6


def test_control_shared_noise_is_seen_by_chi_square():
    statistic, freedom = joint_chi_square(draft_stream=2, requests=4_000)
    assert chi2.sf(statistic, freedom) < 1e-6


def test_zero_residual():
    """Nothing of p above q: the row emits from p. Reached by unnormalised probabilities (or rounding) alone."""
    p = torch.tensor([0.25, 0.25], dtype=torch.float64)
    for q in (p, p + 0.25, torch.full_like(p, math.inf)):
        assert torch.equal(residual(p, q), p)
    law = chain_law([p, p], [p + 0.25], [1])
    assert law.accept == [0.5]
    assert law.emit[0].tolist() == [0.5, 0.5]
    draws = set()
    for seed in range(20):
        out = verify_chain(
            None,
            torch.tensor([1]),
            torch.tensor([0, 1]),
            make_params([{}], [seed]),
            target_probs=p.repeat(2, 1),
            draft_probs=(p + 0.25)[None],
        )
        draws |= {int(out.tokens[0, 0])} if not out.num_accepted else set()
    assert draws == {0, 1}
