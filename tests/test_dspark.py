"""DSpark in the decoder: the target's text and law, whatever is drafted, and drafts that are those of the network."""

import pytest
import torch

import specdec_kernels as sk
from tests.dspark_cases import (
    KEPT,
    WIDTH,
    drafter_of,
    kept_ids,
    public_config,
    public_tensors,
    reference_block,
    tapped,
    write,
)
from tests.laws import assert_law
from tests.smollm2_fixture import TINY, assert_same_text, tiny
from tests.test_decoder import one, padded, prompts, sampling

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import DraftContext, DSparkDrafter, DSparkModel, SpeculativeDecoder, StepOutcome  # isort: skip
from specdec_kernels.decoding.drafters import dspark  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 30
REDUCED = {"draft_vocab_size": len(KEPT)}
SCHEDULES = {
    "all": {},
    "threshold": {"schedule": "threshold", "threshold": 0.25},
    "budget": {"schedule": "budget", "verify_budget": 5},
    "throughput": {"schedule": "throughput"},
}


def with_costs(drafter, cost=lambda d: 1 + 0.15 * d):
    """The same drafter, told costs as a decoder with adaptive=True would."""
    propose = drafter.propose

    def told(context):
        context.relative_cost = cost
        return propose(context)

    drafter.propose = told
    return drafter


def recorded(drafter):
    """(texts, context, batch) of every proposal, in order."""
    seen, propose = [], drafter.propose

    def record(context):
        batch = propose(context)
        seen.append(([list(t) for t in context.tokens], context, batch))
        return batch

    drafter.propose = record
    return seen


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize(
    ("schedule", "keys"),
    [("all", {}), ("all", REDUCED), ("threshold", REDUCED), ("budget", {}), ("throughput", {})],
    ids=lambda value: value if isinstance(value, str) else "reduced" if value else "whole",
)
def test_coupled_text_is_the_plain_text(tmp_path, keys, schedule, cache):
    target, params = tiny("llama"), sampling(3, top_p=0.95)
    ids, mask = padded(prompts(3), "left")
    plain = SpeculativeDecoder(target).generate(ids, mask, params, max_new_tokens=NEW)
    model, *_ = drafter_of(tmp_path, target, **keys)
    drafter = with_costs(DSparkDrafter(model, cache=cache, page_size=4, **SCHEDULES[schedule]))
    seen = recorded(drafter)
    decoder = SpeculativeDecoder(target, drafter, num_draft=7, rule="coupled", adaptive=False, cache=cache, page_size=4)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
    for b, prompt in enumerate(prompts(3)):
        assert_same_text(target, prompt, result.tokens[b], plain.tokens[b], params, b)
    assert result.stats.accepted > 0 and result.stats.draft_calls == len(seen)
    possible = sum(min(n, 5) for _, context, _ in seen for n in context.budgets)
    assert (result.stats.drafted == possible) == (schedule == "all")
    for _, context, batch in seen:
        if batch is not None:
            assert batch.logits is None and all(
                c <= min(n, 5) for c, n in zip(batch.counts, context.budgets, strict=True)
            )
            assert not keys or set(batch.tokens.tolist()) <= set(KEPT)
            assert schedule != "budget" or sum(batch.counts) <= 5


@pytest.mark.parametrize("kind", TINY)
def test_greedy_text_is_the_targets(tmp_path, kind):
    target = tiny(kind)
    ids, mask = padded(prompts(3), "right")
    greedy = SamplingTensors.create(temperature=0.0, batch_size=3)
    plain = SpeculativeDecoder(target).generate(ids, mask, greedy, max_new_tokens=NEW)
    drafter = DSparkDrafter(drafter_of(tmp_path, target)[0])
    seen = recorded(drafter)
    result = SpeculativeDecoder(target, drafter, rule="token", adaptive=False).generate(
        ids, mask, greedy, max_new_tokens=NEW
    )
    for b, prompt in enumerate(prompts(3)):
        assert_same_text(target, prompt, result.tokens[b], plain.tokens[b], greedy, b)
    assert seen and all(batch.logits is None for *_, batch in seen)


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("keys", [{}, REDUCED], ids=["whole", "reduced"])
def test_drafts_are_those_of_the_network(tmp_path, keys, cache):
    """Every step's q is what loops over the target's recomputed states give, and its tokens are drawn from the written rows: with
    steps without drafts in between, rows that leave, and drafts cut off by confidence."""
    target, params = tiny("llama", scale=0.2), sampling(3, top_p=0.9)
    model, config, tensors = drafter_of(tmp_path, target, flat=0.1, **keys)
    drafter = DSparkDrafter(
        model, cache=cache, page_size=4, schedule="threshold", threshold=0.05, matmul_dtype=torch.float32
    )
    seen, propose = recorded(drafter), drafter.propose
    step = iter(range(1000))
    drafter.propose = lambda context: None if next(step) % 4 in (1, 2) else propose(context)
    ids, mask = padded(prompts(3), "left")
    decoder = SpeculativeDecoder(target, drafter, num_draft=4, rule="token", adaptive=False)
    result = decoder.generate(ids, mask, params, max_new_tokens=45)
    assert result.stats.accepted > 0 and len({len(texts) for texts, *_ in seen}) > 1
    t = {name: tensor.double() for name, tensor in tensors.items()}
    table, checked, uneven = model.target_to_draft(), 0, False
    for texts, context, batch in seen:
        uneven |= batch.rows is not None
        rows = batch.rows if batch.rows is not None else torch.arange(len(batch.tokens))
        at = 0
        for b, text in enumerate(texts):
            h = reference_block(config, tensors, tapped(target, text[:-1]), text[-1])
            before = text[-1]
            request = next(i for i, p in enumerate(prompts(3)) if text[: len(p)] == p)
            for k in range(batch.counts[b]):
                q = batch.logits[rows[at]]
                expected = h[k] @ t["lm_head.weight"].T
                expected += t["markov_head.markov_w1.weight"][before] @ t["markov_head.markov_w2.weight"].T
                torch.testing.assert_close(q.double(), expected, rtol=1e-4, atol=1e-4)
                drawn = sk.sample(
                    q[None], one(params, request), context.position[b : b + 1], stream=0, ids=torch.tensor([k]),
                    target_to_draft=table, return_nucleus=True,
                )  # fmt: skip
                before = int(batch.tokens[at])
                assert int(drawn.tokens) == before
                assert [float(f[at]) for f in batch.nucleus] == [float(f) for f in drawn.nucleus]
                at += 1
                checked += 1
        assert at == len(batch.tokens)
    assert checked > 30 and uneven


@pytest.mark.parametrize(
    ("rule", "schedule", "reduced"),
    [
        ("token", {}, False),
        ("token", {"schedule": "threshold", "threshold": 0.4}, True),
        ("block", {"schedule": "threshold", "threshold": 0.4}, False),
        ("token", {"schedule": "budget", "verify_budget": 5000}, False),
        ("token", {"schedule": "throughput"}, False),
    ],
)
def test_law_of_the_text(tmp_path, rule, schedule, reduced):
    """Three tokens over several steps, by chi-square against the target's own probabilities. The confidences depend strongly on the
    drafts before, so lengths that looked at a draft's own value would show."""
    target, rows, prompt = tiny("llama", vocab=6, scale=0.1), 4096, [1, 4, 2]
    keys = {"draft_vocab_size": len(kept_ids(6))} if reduced else {}
    model, *_ = drafter_of(tmp_path, target, vocab_size=6, mask_token_id=5, block_size=3, flat=0.5, **keys)
    with torch.no_grad():
        model.markov_head.markov_w1.weight.mul_(2)
        model.confidence_head.proj.weight[:, WIDTH:].mul_(4)
    drafter = with_costs(DSparkDrafter(model, **schedule), lambda d: 1 + 0.4 * d)
    seen = recorded(drafter)
    params = SamplingTensors.create(temperature=1.0, seed=list(range(rows)), batch_size=rows)
    decoder = SpeculativeDecoder(target, drafter, num_draft=3, rule=rule, adaptive=False)
    result = decoder.generate(torch.tensor([prompt] * rows), params=params, max_new_tokens=4)
    assert result.stats.accepted > rows // 4
    if schedule:
        counts = torch.bincount(torch.tensor(seen[0][2].counts), minlength=3)
        assert int((counts > rows // 50).sum()) > 1, counts
    assert_law(target, prompt, result.tokens)


@pytest.mark.parametrize("cache", ["ragged", "paged"])
def test_rows_that_end_at_once(tmp_path, cache):
    """A row ends with its first token, before any context has been taken in, and others inside of accepted drafts."""
    target, params = tiny("llama", scale=0.2), sampling(3)
    ids, mask = padded(prompts(3), "left")
    plain = SpeculativeDecoder(target).generate(ids, mask, params, max_new_tokens=NEW)
    ends = [plain.tokens[0][0], plain.tokens[1][9]]
    plain = SpeculativeDecoder(target).generate(ids, mask, params, max_new_tokens=NEW, eos=ends)
    assert plain.lengths[0] == 1 and len(set(plain.lengths)) == 3
    drafter = DSparkDrafter(drafter_of(tmp_path, target, flat=0.1)[0], cache=cache, page_size=4)
    decoder = SpeculativeDecoder(target, drafter, rule="coupled", adaptive=False)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW, eos=ends)
    for b, prompt in enumerate(prompts(3)):
        assert_same_text(target, prompt, result.tokens[b], plain.tokens[b], params, b)
    assert result.stats.accepted > 0


def test_padded_vocabulary(tmp_path):
    """A drafter with more ids than the target, as padding: none of them is drafted, whatever its head gives them."""
    target, params = tiny("llama", scale=0.2), sampling(3)
    model, *_ = drafter_of(tmp_path, target, vocab_size=70, mask_token_id=69, flat=0.1)
    with torch.no_grad():
        model.lm_head.weight[64:] = 100 * model.lm_head.weight[:6]
    drafter = DSparkDrafter(model)
    seen = recorded(drafter)
    ids, mask = padded(prompts(3), "left")
    decoder = SpeculativeDecoder(target, drafter, rule="token", adaptive=False)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
    assert result.stats.accepted > 0 and result.status == [0, 0, 0]
    assert all(batch.logits.shape[-1] == 64 and int(batch.tokens.max()) < 64 for *_, batch in seen if batch)


def step_of(drafter, budgets, cost):
    batch = len(budgets)
    params = SamplingTensors.create(temperature=1.0, seed=0, batch_size=batch)
    tokens = [[1]] * batch
    context = DraftContext(tokens, torch.ones(batch, dtype=torch.int64), params, budgets, "token", cost)
    return dspark._Lengths(drafter, context, budgets)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "all"])
def test_drawing_stops_where_nothing_follows(tmp_path, schedule):
    """Lengths decided while drafts are drawn are those decided once all are there, and as many as can be are not drawn."""
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    generator = torch.Generator().manual_seed(0)
    stopped = 0
    for trial in range(40):
        batch = trial % 3 + 1
        drafter = DSparkDrafter(model, packed=False, **SCHEDULES[schedule])
        given = torch.randint(6, (batch,), generator=generator).tolist()
        budgets = [max(n, 1 - b) for b, n in enumerate(given)]
        logits = torch.randn(batch, 5, generator=generator) + 1

        def cost(d):
            return 1 + 0.2 * d

        early, late = step_of(drafter, budgets, cost), step_of(drafter, budgets, cost)
        late.asks = False
        drawn = 0
        while drawn < max(budgets) and early.wants(logits[:, drawn]):
            drawn += 1
        assert all(late.wants(logits[:, k]) for k in range(max(budgets)))
        assert early.final() == late.final() and max(early.final()) == drawn
        stopped += drawn < max(budgets)
        survival = torch.sigmoid(logits).cumprod(1)
        if schedule == "threshold":
            expected = [min(int((row >= 0.25).sum()), n) for row, n in zip(survival, budgets, strict=True)]
            assert early.final() == expected
        if schedule == "budget":
            assert sum(early.final()) == min(5, sum(budgets))
    assert stopped > 5


def test_throughput_table():
    """By hand: the costs of 1 and 2 drafts are 1.1 and 1.2, so verification alone costs 1.0 for none, and half a draft each 1.05."""
    context = DraftContext([[1], [1]], None, None, [2, 1], "token", lambda d: 1 + 0.1 * d)
    table = dspark._steps_per_second(context, [2, 1])
    expected = 1 / torch.tensor([1.0, 1.0, 1.0, 1.05, 1.1, 1.15])
    torch.testing.assert_close(table, expected)
    context.relative_cost = lambda d: None
    assert dspark._steps_per_second(context, [2, 1]) is None


def test_unknown_costs_verify_all(tmp_path):
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    drafter = DSparkDrafter(model, schedule="throughput")
    unknown, known = (step_of(drafter, [3, 1], cost) for cost in (lambda d: None, lambda d: 1.0 + d))
    never = torch.full((2,), -20.0)
    assert unknown.wants(never) and unknown.final() == [3, 1]
    assert not known.wants(never) and known.final() == [0, 0]


def test_states_that_are_missing(tmp_path):
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    drafter = DSparkDrafter(model)
    drafter.begin([[1, 2, 3]], SamplingTensors.create(temperature=0.0), 9)
    with pytest.raises(ValueError, match=r"outcome.hidden must be \[3, T \* H\], got None"):
        drafter.observe(StepOutcome([[4]], [0], [0]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "model must be a DSparkModel, got NoneType"),
        ({"schedule": "best"}, "schedule must be None or one of threshold, budget, throughput, got 'best'"),
        ({"schedule": "threshold", "threshold": 0.0}, r"threshold must be in \(0, 1\], got 0.0"),
        ({"schedule": "budget"}, "verify_budget must be an int >= 1 with .*, got None"),
        ({"verify_budget": 3}, "verify_budget must be .* None without, got 3"),
        ({"schedule": "budget", "verify_budget": True}, "verify_budget must be .*, got True"),
        ({"packed": "yes"}, 'packed must be True, False or "auto"'),
        ({"matmul_dtype": "bf16"}, "matmul_dtype must be None, torch.float32 or torch.bfloat16, got bf16"),
        ({"cache": "flat"}, "DSparkDrafter: cache must be one of ragged, paged, got 'flat'"),
        ({"page_size": 0}, "page_size must be an int >= 1"),
    ],
)
def test_errors_name_the_argument(tmp_path, given, message):
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    with pytest.raises(ValueError, match=message):
        DSparkDrafter(**{"model": model, **given})


def test_models_and_targets_that_do_not_fit(tmp_path):
    target = tiny("llama")
    silent, *_ = drafter_of(tmp_path / "a", target, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="schedule must be None for a model without confidence head, got 'threshold'"):
        DSparkDrafter(silent, schedule="threshold")
    mixed, *_ = drafter_of(
        tmp_path / "b",
        target,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        use_sliding_window=True,
    )
    with pytest.raises(ValueError, match="cannot be packed: layers must be of one kind"):
        DSparkDrafter(mixed, packed=True)
    with pytest.raises(ValueError, match="vocab_size must be at least the target's 70 ids, got 64"):
        SpeculativeDecoder(tiny("llama", vocab=70), DSparkDrafter(silent))
    shared, *_ = drafter_of(tmp_path / "c", target, own=False)
    for model in (shared, silent):
        with pytest.raises(ValueError, match="model must be made for this target"):
            SpeculativeDecoder(tiny("llama", seed=5), DSparkDrafter(model))


@pytest.mark.parametrize("own", [True, False])
def test_low_precision_drafter(tmp_path, own):
    """A bfloat16 drafter of a float32 target, its embeddings and head its own or the target's."""
    target, params = tiny("qwen3", scale=0.2), sampling(3)
    config = public_config()
    tensors = public_tensors(config, own=own)
    model = DSparkModel.load(write(tmp_path, config, tensors), target, dtype=torch.bfloat16)
    ids, mask = padded(prompts(3), "left")
    plain = SpeculativeDecoder(target).generate(ids, mask, params, max_new_tokens=NEW)
    drafter = DSparkDrafter(model, schedule="threshold", threshold=0.1)
    assert drafter.forward._packed is None
    result = SpeculativeDecoder(target, drafter, rule="coupled", adaptive=False).generate(
        ids, mask, params, max_new_tokens=NEW
    )
    for b, prompt in enumerate(prompts(3)):
        assert_same_text(target, prompt, result.tokens[b], plain.tokens[b], params, b)
    seen = recorded(drafter)
    result = SpeculativeDecoder(target, drafter, rule="token", adaptive=False).generate(
        ids, mask, params, max_new_tokens=NEW
    )
    assert result.stats.accepted > 0 and result.status == [0, 0, 0]
    assert {batch.logits.dtype for *_, batch in seen if batch} == {torch.bfloat16 if own else torch.float32}
    texts, _, batch = seen[0]
    h = reference_block(
        config,
        tensors,
        tapped(target, texts[0][:-1]),
        texts[0][-1],
        target.model.embed_tokens.weight.detach() if not own else None,
    )
    head = tensors["lm_head.weight"] if own else target.lm_head.weight.detach()
    expected = h[0] @ head.double().T
    expected += (
        tensors["markov_head.markov_w1.weight"][texts[0][-1]].double()
        @ tensors["markov_head.markov_w2.weight"].double().T
    )
    assert float((batch.logits[0].double() - expected).std() / expected.std()) < 0.05
