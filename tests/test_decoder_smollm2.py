"""Speculative decoding on a real model: SmolLM2-135M-Instruct, dequantised from Q4_1."""

import copy

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, chat, recompute, smollm2

from specdec_kernels import SamplingTensors, verify_chain  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftContext,
    DraftModelDrafter,
    ModelForward,
    PackedForward,
    PromptLookupDrafter,
    SpeculativeDecoder,
)
from specdec_kernels.demo.prompts import PROMPTS  # isort: skip

pytestmark = pytest.mark.model

NEW = 32


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return smollm2()


@pytest.fixture(scope="module")
def decoders(model_and_tokenizer):
    """Plain and speculative on one packed copy of the weights; draft lengths chosen by measured costs would follow whatever else
    the machine does."""
    plain = SpeculativeDecoder(model_and_tokenizer[0], packed=True)
    return plain, SpeculativeDecoder(
        model_and_tokenizer[0], PromptLookupDrafter(), adaptive=False, forward=plain.forward
    )


@pytest.fixture(scope="module")
def noisy(model_and_tokenizer):
    """A drafter that mostly agrees: the target with noise on its matrices."""
    draft = copy.deepcopy(model_and_tokenizer[0])
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in draft.model.layers:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1 * parameter.std().item())
    return draft


@torch.inference_mode()
def test_packed_forward_agrees(model_and_tokenizer, decoders):
    model, tokenizer = model_and_tokenizer
    generic, packed = ModelForward(model), decoders[0].forward
    assert isinstance(packed, PackedForward)
    ids = chat(tokenizer, PROMPTS["quote text"][0])[:, :60]
    cache = generic.new_cache(1, 80)
    generic(ids[:, :40], [40], cache, last_only=True)
    cache.advance([40])
    for count in (1, 2, 6, 16):
        expected = generic(ids[:, 40 : 40 + count], [count], cache).logits
        torch.testing.assert_close(packed(ids[:, 40 : 40 + count], [count], cache).logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_is_transformers_greedy(model_and_tokenizer, decoders, name):
    model, tokenizer = model_and_tokenizer
    ids = chat(tokenizer, PROMPTS[name][0])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    result = decoders[1].generate(ids, params=SamplingTensors.create(temperature=0.0), max_new_tokens=NEW)
    assert_same_text(model, ids[0].tolist(), result.tokens[0], expected[0, ids.shape[1] :].tolist())
    if PROMPTS[name][1]:
        assert result.stats.tokens_per_call > 1.5


def test_trees_of_lookups_accept_more(model_and_tokenizer, decoders):
    """An edit, whose copy has to choose between places."""
    model, tokenizer = model_and_tokenizer
    ids, greedy = chat(tokenizer, PROMPTS["edit code"][0]), SamplingTensors.create(temperature=0.0)
    trees = SpeculativeDecoder(model, PromptLookupDrafter(tree=True), adaptive=False, forward=decoders[1].forward)
    chain, tree = (d.generate(ids, params=greedy, max_new_tokens=2 * NEW) for d in (decoders[1], trees))
    assert_same_text(model, ids[0].tolist(), tree.tokens[0], chain.tokens[0])
    assert tree.stats.tokens_per_call > chain.stats.tokens_per_call > 2


def test_seed_gives_the_same_text_with_any_drafter(model_and_tokenizer, decoders, noisy):
    """Rule "coupled", a padded batch of three prompts: without drafts, with lookups, with a draft model."""
    model, tokenizer = model_and_tokenizer
    prompts = [chat(tokenizer, PROMPTS[name][0])[0].tolist() for name in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    params = SamplingTensors.create(temperature=0.8, top_p=0.9, seed=11, batch_size=3)
    plain, lookup = decoders
    texts = plain.generate(ids, mask, params, max_new_tokens=NEW).tokens
    drafted = SpeculativeDecoder(
        model, DraftModelDrafter(noisy, packed=False), num_draft=3, rule="coupled", packed=False
    )
    for decoder in (lookup, drafted):
        result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
        for b, prompt in enumerate(prompts):
            assert_same_text(model, prompt, result.tokens[b], texts[b], params, b)


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_sampled_frequencies(model_and_tokenizer, noisy, rule):
    """The first token that a verification emits, against the target's own filtered distribution, by chi-square."""
    model, tokenizer = model_and_tokenizer
    ids = tokenizer("The weather today is", return_tensors="pt").input_ids
    rows, temperature, top_k = 1024, 1.0, 8
    # The first token comes from the prefill; fixing it makes the second one the first to be verified.
    first = int(recompute(model, ids[0].tolist())[-1].argmax())
    text = [*ids[0].tolist(), first]
    logits = recompute(model, text)[-1].double()
    kept = logits.topk(top_k)
    law = (kept.values / temperature).softmax(-1)

    drafter = DraftModelDrafter(noisy, packed=False)
    params = SamplingTensors.create(temperature=temperature, top_k=top_k, seed=5, batch_size=rows)
    drafter.begin([text] * rows, params, len(text) + 4)
    context = DraftContext([text] * rows, torch.full((rows,), len(text)), params, [1] * rows, rule, lambda drafts: None)
    with torch.inference_mode():
        # One row of the draft model stands for all: the prompts are equal.
        one = drafter._catch_up
        drafter._cache = drafter.forward.new_cache(1, len(text) + 4)
        drafter._start = lambda context: one(context.tokens[:1]).expand(rows, -1).contiguous()
        batch = drafter.propose(context)
        target = recompute(model, text)[-1:]
        second = {t: recompute(model, [*text, t])[-1:] for t in set(batch.tokens.tolist())}
        stacked = torch.cat([x for t in batch.tokens.tolist() for x in (target, second[t])])
        out = verify_chain(
            stacked, batch.tokens, torch.arange(rows + 1, dtype=torch.int32), params, context.position, rule=rule,
            max_draft=1, draft_logits=batch.logits, draft_nucleus=batch.nucleus, draft_params=batch.params,
        )  # fmt: skip
    emitted = out.tokens[:, 0]
    observed = torch.tensor([(emitted == t).sum() for t in kept.indices], dtype=torch.float64)
    assert observed.sum() == rows, "a token outside the filter was emitted"
    expected = law * rows
    big = expected >= 5
    observed = torch.cat([observed[big], observed[~big].sum()[None]])
    expected = torch.cat([expected[big], expected[~big].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected) ** 2 / expected)[used].sum())
    assert statistic < 35, f"chi-square {statistic:.1f} on {int(used.sum()) - 1} degrees of freedom"
    assert 0.2 < out.num_accepted.float().mean() < 1.0
