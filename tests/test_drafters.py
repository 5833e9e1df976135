"""Drafters: what they propose, and that their own state follows what was accepted."""

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, recompute, tiny

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftContext,
    DraftModelDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    StepOutcome,
)


def context(texts, budget=5, rule="coupled", cost=lambda d: None, params=None):
    lengths = torch.tensor([len(t) for t in texts])
    params = params or SamplingTensors.create(temperature=0.0, batch_size=len(texts))
    budgets = budget if isinstance(budget, list) else [budget] * len(texts)
    return DraftContext([list(t) for t in texts], lengths, params, budgets, rule, cost)


def begin(drafter, texts):
    drafter.begin(texts, SamplingTensors.create(temperature=0.0, batch_size=len(texts)), 256)
    return drafter


@torch.inference_mode()
@pytest.mark.parametrize("accepted", [[3, 3], [3, 0], [1, 2], [0, 0]])
def test_draft_cache_after_acceptance(accepted):
    """The cache never holds the last draft's own entry: after full acceptance the next step feeds two tokens, and it
    never holds a rejected one. Every proposal is that of the draft model on the committed text."""
    model = tiny("gemma3")
    drafter = DraftModelDrafter(model)
    texts = [[5, 9, 2, 7], [11, 4, 30, 8, 1, 40]]
    begin(drafter, texts)
    fed = []
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, output: fed.append(args[0].shape[1]))
    try:
        for _ in range(4):
            fed.clear()
            batch = drafter.propose(context(texts, 3))
            drafts = batch.tokens.view(2, 3).tolist()
            for text, row in zip(texts, drafts, strict=True):
                for i, token in enumerate(row):
                    logits = recompute(model, text + row[:i])[-1]
                    assert logits.max() - logits[token] < 1e-4
            texts = [t + row[:a] + [3] for t, row, a in zip(texts, drafts, accepted, strict=True)]
            emitted = [[*row[:a], 3] for row, a in zip(drafts, accepted, strict=True)]
            drafter.observe(StepOutcome(emitted, [3, 3], accepted))
            kept = [len(t) - 1 - (a == 3) for t, a in zip(texts, accepted, strict=True)]
            assert drafter._cache.lengths == kept
    finally:
        handle.remove()
    assert fed[:3] == [2 if max(accepted) == 3 else 1, 1, 1]


@torch.inference_mode()
def test_draft_cache_catches_up_after_plain_steps():
    model = tiny("llama")
    drafter = begin(DraftModelDrafter(model), [[5, 9, 2]])
    text = [5, 9, 2]
    drafter.propose(context([text], 2))
    drafter.observe(StepOutcome([[8]], [2], [0]))
    text.append(8)
    for token in (4, 4, 6, 1):
        drafter.observe(StepOutcome([[token]], [0], [0]))
        text.append(token)
    token = int(drafter.propose(context([text], 1)).tokens)
    logits = recompute(model, text)[-1]
    assert logits.max() - logits[token] < 1e-4


def test_drafting_for_itself_accepts_everything():
    model = tiny("qwen3")
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    params = SamplingTensors.create(temperature=1.0, top_p=0.9, seed=3, batch_size=3)
    for rule in ("token", "coupled"):
        decoder = SpeculativeDecoder(model, DraftModelDrafter(model), num_draft=4, rule=rule, adaptive=False)
        stats = decoder.generate(ids, params=params, max_new_tokens=41).stats
        # Rounding of 1- and 5-token forwards can lose a draft, no more.
        assert stats.acceptance_rate > 0.97, rule
        assert stats.tokens_per_call > 4.5


@pytest.mark.parametrize("draft_vocab", [64 + 19, 64 - 13])
@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_padded_and_shorter_vocabularies(draft_vocab, rule):
    target, draft = tiny("llama"), tiny("llama", seed=2, vocab=draft_vocab)
    drafter = DraftModelDrafter(draft)
    # Ids that a shorter draft has no embedding for: in the prompts, and in what the target samples.
    ids = torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(1))
    ids[0, 2] = ids[1, -1] = 63
    params = SamplingTensors.create(temperature=2.0, seed=3, batch_size=2)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda c: seen.append(propose(c)) or seen[-1]
    decoder = SpeculativeDecoder(target, drafter, rule=rule, adaptive=False)
    result = decoder.generate(ids, params=params, max_new_tokens=20)
    assert seen and all(int(b.tokens.max()) < min(64, draft_vocab) for b in seen if b)
    assert result.status == [0, 0]
    assert max(map(max, result.tokens)) >= 64 - 13
    if rule == "coupled":
        plain = SpeculativeDecoder(target).generate(ids, params=params, max_new_tokens=20)
        for b in range(2):
            assert_same_text(target, ids[b].tolist(), result.tokens[b], plain.tokens[b], params, b)


def test_reduced_vocabulary_head():
    """A head over every third id, mapped by target_to_draft: target ids come out, and the text is the target's."""
    target = tiny("llama")
    kept = torch.arange(0, 64, 3)
    draft = tiny("llama", seed=31)
    with torch.no_grad():
        draft.lm_head = torch.nn.Linear(32, len(kept), bias=False)
        draft.lm_head.weight.copy_(target.lm_head.weight[kept])
        draft.model = target.model
    mapping = torch.full((64,), -1)
    mapping[kept] = torch.arange(len(kept))
    ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
    params = SamplingTensors.create(temperature=1.0, top_p=0.9, seed=3, batch_size=2)
    for rule in ("token", "coupled"):
        drafter = DraftModelDrafter(draft, target_to_draft=mapping)
        seen = []
        propose = drafter.propose
        drafter.propose = lambda c, propose=propose, seen=seen: seen.append(propose(c)) or seen[-1]
        decoder = SpeculativeDecoder(target, drafter, rule=rule, adaptive=False)
        result = decoder.generate(ids, params=params, max_new_tokens=30)
        assert all((b.tokens % 3 == 0).all() for b in seen if b)
        assert result.stats.accepted > 0 and result.status == [0, 0]
    plain = SpeculativeDecoder(target).generate(ids, params=params, max_new_tokens=30)
    for b in range(2):
        assert_same_text(target, ids[b].tolist(), result.tokens[b], plain.tokens[b], params, b)


def test_vocabularies_that_do_not_fit():
    target = tiny("llama")
    with pytest.raises(ValueError, match=r"got 2000 against 64; models with another tokenizer cannot draft"):
        SpeculativeDecoder(target, DraftModelDrafter(tiny("llama", vocab=2000)))
    with pytest.raises(ValueError, match=r"target_to_draft must be \[V=64\], got \[63\]"):
        SpeculativeDecoder(target, DraftModelDrafter(target, target_to_draft=torch.zeros(63, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"below the draft's 64 columns, got 64"):
        SpeculativeDecoder(target, DraftModelDrafter(target, target_to_draft=torch.full((64,), 64)))


def test_length_peeks():
    """How many drafts a model drafter makes does not depend on the tokens it draws."""
    texts = [[1, 2, 3]] * 3
    drafter = begin(DraftModelDrafter(tiny("llama")), texts)
    for seed in range(4):
        params = SamplingTensors.create(temperature=1.0, seed=seed, batch_size=3)
        with torch.inference_mode():
            assert drafter.propose(context(texts, [3, 1, 2], "token", params=params)).counts == [3, 1, 2]
            drafter.observe(StepOutcome([[4]] * 3, [3, 1, 2], [0, 0, 0]))
        texts = [[*t, 4] for t in texts]


def test_lookup_proposes_what_followed():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51, 2, 3, 4]
    drafter = begin(PromptLookupDrafter(), [text, [1, 2, 3]])
    batch = drafter.propose(context([text, [1, 2, 3]]))
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9] and batch.counts == [5, 0]
    assert drafter.propose(context([text, [1, 2, 3]], [2, 2])).tokens.tolist() == [5, 6]
    assert drafter.propose(context([text, [1, 2, 3]], 0)) is None
    assert begin(PromptLookupDrafter(), [[1, 2, 3]]).propose(context([[1, 2, 3]])) is None


def test_lookup_resumes_behind_a_changed_token():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 1, 2, 3]
    drafter = begin(PromptLookupDrafter(), [text])
    assert drafter.propose(context([text])).tokens.tolist() == [4, 5, 6, 7, 8]
    # 4 accepted, then 60 where the source has 5.
    drafter.observe(StepOutcome([[4, 60]], [5], [1]))
    text += [4, 60]
    assert drafter.propose(context([text])).tokens.tolist() == [6, 7, 8, 9, 50]
    # The copy is given up after more changes in a row than one edit makes.
    for token in (61, 62, 63):
        drafter.observe(StepOutcome([[token]], [5], [0]))
        text.append(token)
        batch = drafter.propose(context([text]))
    assert batch is None


def test_lookup_resumed_copy_counts_as_a_long_match():
    """Behind the change comes what the source has, not what came more often behind the first token of the resumed copy."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 50, 6, 9, 51, 6, 9, 52, 1, 2, 3]
    drafter = begin(PromptLookupDrafter(), [text])
    assert drafter.propose(context([text], 2)).tokens.tolist() == [4, 5]
    drafter.observe(StepOutcome([[4, 60]], [2], [1]))
    assert drafter.propose(context([[*text, 4, 60]], 3)).tokens.tolist() == [6, 7, 8]


def test_lookup_weighs_evidence_against_cost():
    text = [7, 1, 2, 3, 4, 5, 6, 50, 7]
    drafter = begin(PromptLookupDrafter(), [text])
    assert drafter.propose(context([text], cost=lambda d: 1 + 0.06 * d)).counts == [3]
    assert drafter.propose(context([text], cost=lambda d: 1 + 0.5 * d)) is None
    # A rejection teaches it to trust matches of one token less: what paid before does not now.
    text, cost = [7, 1, 8, 2, 50, 7], lambda d: 1 + 0.3 * d
    drafter = begin(PromptLookupDrafter(), [text])
    assert drafter.propose(context([text], cost=cost)).tokens.tolist() == [1]
    drafter.observe(StepOutcome([[51]], [1], [0]))
    drafter.observe(StepOutcome([[52, 53, 54, 55, 8]], [0], [0]))
    assert drafter.propose(context([[*text, 51, 52, 53, 54, 55, 8]], cost=cost)) is None
    assert begin(drafter, [[8, 2, 50, 8]]).propose(context([[8, 2, 50, 8]], cost=cost)).counts == [1]
    long = [*range(1, 20), 40, *range(1, 16)]
    drafter = begin(PromptLookupDrafter(), [long])
    assert drafter.propose(context([long], cost=lambda d: 1 + 0.3 * d)).counts[0] >= 1


def test_lookup_prefers_what_followed_more_often():
    """Of the places that the longest match has; the last of equals, and the longest match before a more frequent one."""
    text = [1, 2, 5, 9, 1, 2, 5, 10, 1, 2, 6, 11, 1, 2]
    assert begin(PromptLookupDrafter(), [text]).propose(context([text], 1)).tokens.tolist() == [5]
    text = [1, 2, 5, 9, 1, 2, 6, 11, 1, 2]
    assert begin(PromptLookupDrafter(), [text]).propose(context([text], 1)).tokens.tolist() == [6]
    text = [3, 4, 7, 1, 2, 5, 9, 2, 6, 9, 2, 6, 8, 1, 2]
    assert begin(PromptLookupDrafter(), [text]).propose(context([text], 1)).tokens.tolist() == [5]


def test_lookup_learns_from_every_judged_draft():
    """Draft i stands behind a match that is i longer than the first one's; what is behind a rejection was not judged."""
    text = [7, 1, 2, 3, 4, 50, 7]
    drafter = begin(PromptLookupDrafter(), [text])
    rates = drafter._rates
    assert [rates.kind(n) for n in (0, 1, 2, 3, 4, 5, 6, 19, 20, 99)] == [0, 1, 2, 3, 4, 4, 5, 7, 8, 8]
    before = [rates[k] for k in range(1, 5)]
    assert drafter.propose(context([text], 4)).tokens.tolist() == [1, 2, 3, 4]
    drafter.observe(StepOutcome([[1, 2, 60]], [4], [2]))
    after = [rates[k] for k in range(1, 5)]
    assert after[0] > before[0] and after[1] > before[1] and after[2] < before[2] and after[3] == before[3]
    # The resumed copy behind the change has a rate of its own.
    before = [rates[k] for k in range(5)]
    assert drafter.propose(context([[*text, 1, 2, 60]], 1)).tokens.tolist() == [4]
    drafter.observe(StepOutcome([[4, 50]], [1], [1]))
    assert [rates[k] > b for k, b in enumerate(before)] == [True, False, False, False, False]


def test_lookup_state_follows_the_rows():
    texts = [[1, 2, 9, 1, 2], [3, 4, 8, 3, 4], [5, 6, 7, 5, 6]]
    drafter = begin(PromptLookupDrafter(), texts)
    drafter.select_rows([0, 2])
    assert drafter.propose(context([texts[0], texts[2]], 1)).tokens.tolist() == [9, 7]


def test_lookup_reads_finished_outputs():
    """Prompts are not looked up, other requests' outputs are once they have finished, and never across their ends."""
    drafter = begin(PromptLookupDrafter(history=100), [[1, 2, 3, 40], [50, 51]])
    drafter.observe(StepOutcome([[5, 6, 7, 8], [9, 5]], [0, 0], [0, 0]))
    assert drafter.propose(context([[1, 2, 3, 40, 5, 6, 7, 8], [50, 51, 9, 5]])) is None
    drafter.select_rows([1])
    assert drafter._history.index.tokens[:-1] == [5, 6, 7, 8], "the other request still runs"
    assert drafter.propose(context([[50, 51, 9, 5]])) is None, "the match with the history starts with the next token"
    drafter.observe(StepOutcome([[6]], [0], [0]))
    assert drafter.propose(context([[50, 51, 9, 5, 6]])).tokens.tolist() == [7, 8]
    begin(drafter, [[2], [8], [9]])
    assert drafter.propose(context([[2], [8], [9]], 3)).tokens.tolist() == [5, 6, 7]
    assert begin(PromptLookupDrafter(), [[5]]).propose(context([[5]])) is None


def test_lookup_history_is_bounded():
    drafter = PromptLookupDrafter(history=20)
    for step in range(30):
        begin(drafter, [[1]])
        drafter.observe(StepOutcome([list(range(10 * step, 10 * step + step))], [0], [0]))
        assert len(drafter._history.index) <= 40
    begin(drafter, [[300]])
    assert drafter.propose(context([[300]], 9)).tokens.tolist() == list(range(301, 310))
    begin(drafter, [[30]])
    assert drafter.propose(context([[30]], 9)) is None


def test_lookup_arguments():
    with pytest.raises(ValueError, match=r"PromptLookupDrafter: max_nodes must be in 1\.\.128, got 129"):
        PromptLookupDrafter(tree=True, max_nodes=129)
    with pytest.raises(ValueError, match="PromptLookupDrafter: history must be >= 0, got -1"):
        PromptLookupDrafter(history=-1)
    assert PromptLookupDrafter(tree=True).trees and not PromptLookupDrafter().trees and not DraftModelDrafter.trees
