"""Block verification: what it gains over the token rule, what breaks it, and texts over several steps with the real keys.
(Its exact one-step laws are in test_oracle_enumeration.py, beside the token rule's.)"""

from unittest.mock import patch

import pytest
import torch

from python_ref import chain_weights, sample, verify_chain
from python_ref.rows import residual
from python_ref.verify_chain import chain_law
from tests.enumeration import (
    TOLERANCE,
    Table,
    World,
    chain_law_of,
    chain_step_law,
    completed,
    draft_law,
    expected_accepted,
    make_params,
    marginal,
    real_step,
    text_law,
    total_variation,
    world,
)
from tests.keyed import text_law_by_steps

VISIBLE_BIAS = 1e-2


def constant(*probs):
    row = torch.tensor(probs, dtype=torch.float64).log()
    return lambda context: row


def test_toy_of_the_paper():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted by `token`, 11/9 by `block` (Sun et al., section 2)."""
    w = World(constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3), d=2)
    assert expected_accepted(real_step([w], rule="token")) == pytest.approx(10 / 9, abs=TOLERANCE)
    assert expected_accepted(real_step([w], rule="block")) == pytest.approx(11 / 9, abs=TOLERANCE)


def test_never_fewer_than_the_token_rule():
    """On every table, and more on most of them; with one draft the rules are the same."""
    more = 0
    for seed in range(12):
        w = world(3, 80 + seed, d=3)
        token, block = (expected_accepted(w.exact(rule=rule)) for rule in ("token", "block"))
        assert block >= token - TOLERANCE
        more += block > token + 1e-3
    assert more > 6
    one = world(4, 92, d=1)
    assert total_variation(real_step([one], rule="block"), real_step([one], rule="token")) < TOLERANCE


def test_deterministic_drafts_have_the_law_of_the_token_rule():
    """The block rule's own formulas on one-hot q, to which verify_chain does not apply them."""
    w = world(3, 93, d=3, q_form="none")
    drafts = draft_law(w.q, 3)
    by_block = chain_step_law(chain_law_of(w, rule=lambda p, q, x: chain_law(p, q, x, "block")), drafts)
    assert total_variation(by_block, w.exact()) < TOLERANCE


def test_weights_are_capped_products():
    """w_i = R_i / max(1, R_1 .. R_i), the form that a parallel scan computes."""
    for seed in range(20):
        w = world(4, 100 + seed, d=5)
        g = torch.Generator().manual_seed(seed)
        drafts = torch.randint(4, (5,), generator=g).tolist()
        rows = [[torch.tensor(of(tuple(drafts[:i])), dtype=torch.float64) for of in (w.p, w.q)] for i in range(5)]
        products = [1.0]
        for (p, q), x in zip(rows, drafts, strict=True):
            products.append(products[-1] * float(p[x] / q[x]))
        weights = chain_weights([p for p, _ in rows], [q for _, q in rows], drafts)
        expected = [r / max(1.0, *products[: i + 1]) for i, r in enumerate(products)]
        assert weights == pytest.approx(expected, rel=1e-12)


def stop_at_first_failure(p, q, drafts):
    law = chain_law(p, q, drafts, "block")
    accept, count = law.accept, []
    for i in range(len(drafts) + 1):
        stands = 1.0
        for a in accept[:i]:
            stands *= a
        count.append(stands * (1 - accept[i] if i < len(drafts) else 1.0))
    return law._replace(count=count)


def residual_without_weight(p, q, drafts):
    law = chain_law(p, q, drafts, "block")
    emit = [r / r.sum() for r in map(residual, p, q)]
    return law._replace(emit=emit + law.emit[-1:])


def products_without_cap(p, q, drafts):
    def uncapped(p, q, drafts):
        weights = [1.0]
        for p_i, q_i, x in zip(p, q, drafts, strict=False):
            weights.append(weights[-1] * float(p_i[x] / q_i[x]))
        return weights

    with patch("python_ref.verify_chain.chain_weights", uncapped):
        return chain_law(p, q, drafts, "block")


@pytest.mark.parametrize(
    ("rule", "bias"),
    [(stop_at_first_failure, 0.1), (residual_without_weight, VISIBLE_BIAS), (products_without_cap, VISIBLE_BIAS)],
)
def test_block_first_failure(rule, bias):
    """Ways in which public implementations were wrong are seen by the same enumeration: a scan that stops at the first
    failure, a residual without the running weight, weights that forget their cap."""
    w = world(3, 94, d=3)
    law = chain_step_law(chain_law_of(w, rule=rule), draft_law(w.q, 3))
    assert total_variation(completed(law, w.p, 4), text_law(w.p, 4)) > bias


def test_length_peeks():
    """Lengths that look at the drafts themselves bias the block rule as well; the same lengths one draft later do not."""
    w = World(constant(0.7, 0.3), constant(0.5, 0.5), d=2)
    peeking = real_step([w], rule="block", length_of=lambda drafts: 2 if drafts[0] == 0 else 0)
    law = completed(marginal(peeking, lambda o: o[0]), w.p, 3, tokens=lambda text: text)
    assert total_variation(law, text_law(w.p, 3)) > VISIBLE_BIAS
    stopping = World(w.target, w.draft, d=2, goes_on=lambda context: context[:1] != (1,))
    law = completed(real_step([stopping], rule="block"), w.p, 3)
    assert total_variation(law, text_law(w.p, 3)) < TOLERANCE


def test_emit_bonus_is_refused():
    """A chunk verified as a block of its own, its last token left to the next chunk, would be biased."""
    p = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="emit_bonus"):
        verify_chain(p, torch.tensor([0]), torch.tensor([0, 1]), make_params([{}]), rule="block", emit_bonus=False)


# --- several steps, real keys ------------------------------------------------------------------------------------------


def stepper(w: World, rule: str, position_of=lambda anchor, j: anchor, length_of=lambda memory, text: 2):
    """One step with real `sample` and `verify_chain`. The memory is the drafts that were thrown away last."""

    def step(text, memory):
        anchor, drafts, rows = len(text), [], []
        for j in range(min(length_of(memory, text), w.d)):
            rows.append(w.draft((*text, *drafts)))
            at = torch.tensor([position_of(anchor, j)])
            ids = torch.tensor([j if position_of(anchor, j) == anchor else 0])
            drafts.append(int(sample(rows[-1][None], make_params([{}], [9]), at, stream=0, ids=ids).tokens))
        out = verify_chain(
            torch.stack([w.target((*text, *drafts[:i])) for i in range(len(drafts) + 1)]),
            torch.tensor(drafts, dtype=torch.int64),
            torch.tensor([0, len(drafts)]),
            make_params([w.filters or {}], [9]),
            torch.tensor([anchor]),
            draft_logits=torch.stack(rows) if rows else torch.zeros(0, 2),
            draft_params=make_params([{}], [9]),
            rule=rule,
        )
        return tuple(out.tokens[0, : int(out.num_emitted)].tolist()), tuple(drafts[int(out.num_accepted) :])

    return step


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_over_steps_with_real_keys(rule, seed):
    """Four tokens over one to four steps. The next step sees nothing of the draws of this one, though the block rule has
    looked at later proposals and coins before it decided."""
    w = World(Table(2, 200 + seed, 1.2), Table(2, 300 + seed, 1.2), d=2)
    law, steps = text_law_by_steps(stepper(w, rule), 4)
    assert steps == 4
    assert total_variation(law, text_law(w.p, 4)) < TOLERANCE


def test_length_follows_discarded_drafts():
    """Lengths may depend on the drafts that the last step threw away: those had draws of their own."""
    w = World(Table(2, 210, 1.2), Table(2, 310, 1.2), d=2)
    for rule in ("token", "block"):
        step = stepper(w, rule, length_of=lambda memory, text: 2 if not memory or memory[0] == 1 else 1)
        assert total_variation(text_law_by_steps(step, 4)[0], text_law(w.p, 4)) < TOLERANCE


def test_noise_reused_in_the_next_step_is_seen():
    """Proposals keyed by absolute position instead of the step's anchor: one step's law is right, the text's is not. (The
    token rule does not look at what it throws away.)"""
    worst = {"token": 0.0, "block": 0.0}
    for seed in range(3):
        w = World(Table(2, 200 + seed, 1.2), Table(2, 300 + seed, 1.2), d=2)
        for rule in worst:
            step = stepper(w, rule, position_of=lambda anchor, j: anchor + j)
            law, _ = text_law_by_steps(step, 4)
            worst[rule] = max(worst[rule], total_variation(law, text_law(w.p, 4)))
    assert worst["block"] > VISIBLE_BIAS
    assert worst["token"] < TOLERANCE


# --- a chain verified in parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_a_chain_verified_in_parts(rule):
    """`emit_bonus=False`: two drafts, one after the other. All of a part accepted: nothing is sampled, and the next part's
    first draft is verified on the row that was left. Rejected: the second draft, which was there already, is thrown away."""
    for seed in range(3):
        w = World(Table(2, 220 + seed, 1.2), Table(2, 320 + seed, 1.2), d=2)

        def step(text, memory):
            rows, drafts = [], []
            for j in range(2):
                rows.append(w.draft((*text, *drafts)))  # noqa: B023
                at = torch.tensor([len(text) + j])  # each part has its own anchor
                stream = 2 if rule == "coupled" else 0
                drafts.append(int(sample(rows[-1][None], make_params([{}], [9]), at, stream=stream).tokens))
            emitted = []
            for j in range(2):
                out = verify_chain(
                    torch.stack([w.target((*text, *drafts[: j + i])) for i in range(2)]), torch.tensor(drafts[j : j + 1]),  # noqa: B023
                    torch.tensor([0, 1]), make_params([{}], [9]), torch.tensor([len(text) + j]), draft_logits=rows[j][None],
                    draft_params=make_params([{}], [9]), rule=rule, emit_bonus=j == 1,
                )  # fmt: skip
                emitted += out.tokens[0, : int(out.num_emitted)].tolist()
                if not int(out.num_accepted):
                    break
            return tuple(emitted), ()

        law, _ = text_law_by_steps(step, 4)
        assert total_variation(law, text_law(w.p, 4)) < TOLERANCE
