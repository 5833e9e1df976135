"""The cost model, and draft lengths chosen by it."""

import random
from statistics import median

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels.decoding import DraftBatch, Drafter, DraftModelDrafter, PromptLookupDrafter, SpeculativeDecoder  # isort: skip
from specdec_kernels.decoding.cost_model import AutoLength, CostModel  # isort: skip
from specdec_kernels.decoding.policy import StepCosts  # isort: skip


def test_speedup_by_hand():
    model = CostModel([0.8, 0.5], lambda d: 1 + 0.1 * d, lambda d: 0.05 * d)
    assert [model.tokens(d) for d in range(4)] == pytest.approx([1, 1.8, 2.2, 2.4])
    assert [model.speedup(d) for d in range(4)] == pytest.approx([1, 1.8 / 1.15, 2.2 / 1.3, 2.4 / 1.45])
    assert model.best(8) == 2
    # Leviathan's closed form where acceptance is one number: (1 - a^(d + 1)) / ((1 - a) (c d + 1)).
    model = CostModel([0.7], lambda d: 1.0, lambda d: 0.2 * d)
    for d in range(6):
        assert model.speedup(d) == pytest.approx((1 - 0.7 ** (d + 1)) / (0.3 * (0.2 * d + 1)))
    assert CostModel([0.2], lambda d: 1 + 0.3 * d, lambda d: 0.0).best(8) == 0, "it loses"
    assert CostModel([], lambda d: 1.0, lambda d: 0.0).best(8) == 0


@pytest.mark.parametrize(("acceptance", "verify", "draft"), [(0.9, 0.02, 0.05), (0.6, 0.05, 0.1), (0.3, 0.3, 0.3)])
def test_lengths_come_to_the_best_one(acceptance, verify, draft):
    """A simulated machine: what is chosen in the end gains as much as the best length of the true costs, up to 3%."""
    rng, costs, length = random.Random(1), StepCosts(), AutoLength(8)
    chosen = []
    for _ in range(3000):
        judged = not costs.wants_drafts(1)
        d = 0 if costs.wants_plain(1) else length.choose(costs, 1) if judged else 8
        accepted = next((i for i in range(d) if rng.random() >= acceptance), d)
        seconds = 1 + verify * d
        costs.record(1, d, seconds * rng.uniform(0.95, 1.05), draft * d)
        if d:
            length.record([d], [accepted])
            chosen.append(d)
        else:
            chosen.append(0)
    true = CostModel([acceptance], lambda d: 1 + verify * d, lambda d: draft * d)
    gains = [true.speedup(d) for d in chosen[1000:]]
    assert sum(gains) / len(gains) > 0.97 * true.speedup(true.best(8))


def test_proposals_cost_what_their_length_says():
    costs = StepCosts()
    costs.record(1, 0, 1.0)
    costs.record(1, 8, 2.0, 0.8)
    costs.record(1, 0, 1.0)
    assert costs.draft(1, 8) == pytest.approx(2.0 * 0.4) and costs.step(1, 8) == pytest.approx(2.0)
    assert costs.draft(1, 0) == 0.0 and costs.step(1, 0) == 1.0
    assert costs.draft(1, 4) == pytest.approx(costs.step(1, 4) * 0.2), "half as many drafts take half as long"
    assert costs.draft(1, 16) == pytest.approx(costs.step(1, 16) * 0.8), "and twice as many twice"


def test_auto_lengths_in_a_decoder():
    """A draft model that agrees gets long drafts, one that does not gets none; the text is the same."""
    model, params = tiny("llama"), sampling(1)
    ids, _ = padded(prompts(1), "left")
    plain = SpeculativeDecoder(model).generate(ids, params=params, max_new_tokens=120).tokens[0]
    rows = {}
    for name, draft in (("agrees", model), ("differs", tiny("llama", seed=9))):
        decoder = SpeculativeDecoder(model, DraftModelDrafter(draft), num_draft="auto", rule="coupled")
        # Costs of a machine whose drafts are cheap, whatever this one is doing.
        decoder.costs.step = lambda batch, d: 1 + 0.02 * d
        decoder.costs.draft = lambda batch, d, depth=None: 0.05 * d
        decoder.costs.relative = lambda batch, d, depth=None: 1 + 0.07 * d
        decoder.costs.wants_plain = decoder.costs.wants_drafts = lambda batch: False
        result = decoder.generate(ids, params=params, max_new_tokens=120)
        assert_same_text(model, prompts(1)[0], result.tokens[0], plain, params)
        rows[name] = result.stats
    assert rows["agrees"].drafted / rows["agrees"].target_rows > 6
    assert rows["differs"].drafted / rows["differs"].target_rows < 3


class _Trees(Drafter):
    """A tree of what the text will be, to `right` tokens, and of wrong tokens beside and behind."""

    trees = deterministic = True

    def __init__(self, text, right):
        self.text, self.right, self.depths = text, right, []

    def begin(self, prompts, params, max_tokens):
        self.start = len(prompts[0])

    def propose(self, context):
        done, depth = len(context.tokens[0]) - self.start, context.budgets[0]
        path = self.text[done : done + depth]
        path = [t if i < self.right else (t + 1) % 64 for i, t in enumerate(path)]
        self.depths.append(len(path))
        tokens = [*path, (path[0] + 2) % 64]
        return DraftBatch(torch.tensor(tokens), [len(tokens)], parents=torch.tensor([*range(len(path)), 0]))


def test_auto_depths_of_trees():
    """Depths that are accepted whole grow to the most; where the third is always wrong, two levels are drafted. A level costs a
    fifth of a step, whatever the tree's nodes cost."""
    model, params = tiny("llama"), sampling(1)
    ids, _ = padded(prompts(1), "left")
    plain = SpeculativeDecoder(model).generate(ids, params=params, max_new_tokens=120).tokens[0]
    for right, want in ((9, 8), (2, 2)):
        drafter = _Trees(plain, right)
        decoder = SpeculativeDecoder(model, drafter, num_draft="auto", max_nodes=12)
        decoder.costs.step = lambda batch, nodes: 1 + 0.01 * nodes
        decoder.costs._proposal = lambda batch, depth: 0.2 * depth
        decoder.costs.wants_plain = decoder.costs.wants_drafts = lambda batch: False
        result = decoder.generate(ids, params=params, max_new_tokens=120, eos=[])
        assert_same_text(model, prompts(1)[0], result.tokens[0], plain, params)
        assert median(drafter.depths[len(drafter.depths) // 2 :]) == want


def test_a_tree_s_proposal_costs_by_its_depth():
    costs = StepCosts()
    for depth in (2, 4):
        costs.record(1, 0, 1.0)
        costs.record(1, 12, 1.5, 0.15 * depth, depth)
    assert costs.draft(1, 12, 3) == pytest.approx(1.5 * 0.3) and costs.step(1, 12) == pytest.approx(1.5)
    assert costs.relative(1, 12, 4) == pytest.approx(1.5 + 0.6)


def test_auto_is_refused_where_it_has_no_say():
    model = tiny("llama")
    lookup = SpeculativeDecoder(model, PromptLookupDrafter(), num_draft="auto")
    assert lookup.num_draft == 8 and lookup.length is None
    for make, got in (
        (
            lambda: SpeculativeDecoder(model, DraftModelDrafter(model), num_draft="auto", adaptive=False),
            "adaptive=False",
        ),
        (lambda: SpeculativeDecoder(model, DraftModelDrafter(model, block_size=2), num_draft="auto"), "block_size"),
    ):
        with pytest.raises(ValueError, match=f"is for adaptive decoding with drafts made at once, got .*{got}"):
            make()
    with pytest.raises(ValueError, match="num_draft must be >= 0 or \"auto\", got 'most'"):
        SpeculativeDecoder(model, num_draft="most")
    assert torch.is_inference_mode_enabled() is False
