"""The decoder's paged cache: the same text as with the ragged one, and pages that come and go with the tokens."""

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, chat, recompute, smollm2, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels.decoding import (  # isort: skip
    DraftModelDrafter,
    ModelForward,
    PagedCache,
    PromptLookupDrafter,
    SpeculativeDecoder,
)

NEW = 40


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("packed", [False, "auto"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_same_text(kind, packed, rule, monkeypatch):
    """Rows that accept different numbers of drafts, end at different steps and are packed; every page is back at the end."""
    model = tiny(kind)
    texts = prompts()
    ids, mask = padded(texts, "left")
    params = sampling(3, top_p=0.95)
    ends = [7, 23]  # some rows stop early
    caches = []
    made = SpeculativeDecoder.new_cache
    monkeypatch.setattr(
        SpeculativeDecoder, "new_cache", lambda self, *args: caches.append(made(self, *args)) or caches[-1]
    )
    results = []
    for cache, page_size in (("ragged", 16), ("paged", 1), ("paged", 5), ("paged", 64)):
        drafter = DraftModelDrafter(tiny(kind, seed=9), packed=packed, cache=cache, page_size=page_size)
        decoder = SpeculativeDecoder(
            model, drafter, rule=rule, packed=packed, adaptive=False, cache=cache, page_size=page_size
        )
        results.append(decoder.generate(ids, mask, params, max_new_tokens=NEW, eos=ends))
        for used in (caches[-1], drafter._cache):
            if cache == "paged":
                assert isinstance(used, PagedCache)
                used.pages.check()
                used.reset()
                assert int(used.pages.num_free) == used.pages.num_pages
    for other in results[1:]:
        assert other.stats.acceptance_rate < 0.9, "something is rejected"
        for b, prompt in enumerate(texts):
            assert_same_text(model, prompt, other.tokens[b], results[0].tokens[b], params, b)


def test_forward_that_nobody_takes_gives_its_pages_back():
    """As `warmup` does: the next forward writes to the same places."""
    model = tiny("llama")
    forward = ModelForward(model)
    cache = forward.new_cache(2, 8, "paged", page_size=4)
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for _ in range(3):
            first = forward(tokens, [9, 4], cache).logits
        assert cache.lengths == [0, 0] and cache.pages.seq_lens.tolist() == [9, 4]
        cache.advance([7, 4])
        cache.pages.check()
        assert cache.pages.seq_lens.tolist() == [7, 4]
        again = forward(tokens[:, 7:8], [1, 1], cache).logits
    torch.testing.assert_close(again[0], first[7], atol=1e-4, rtol=0)
    expected = recompute(model, [*tokens[1, :4].tolist(), int(tokens[1, 7])])[-1]
    torch.testing.assert_close(again[1], expected, atol=1e-4, rtol=0)


def test_more_is_taken_than_was_reserved():
    cache = ModelForward(tiny("llama")).new_cache(2, 8, "paged")
    cache.reserve([3, 1], 3)
    with pytest.raises(ValueError, match=r"PagedCache.advance: counts\[1\] must be in \[0, 1\], got 2"):
        cache.advance([3, 2])
    with pytest.raises(ValueError, match=r"PagedCache.rollback: counts\[0\] must be in \[0, 0\], got 1"):
        cache.rollback([1, 0])
    assert cache.lengths == [0, 0] and cache.pages.seq_lens.tolist() == [3, 1]
    cache.advance([2, 1])
    assert cache.lengths == [2, 1]


@pytest.mark.parametrize("owner", ["SpeculativeDecoder", "DraftModelDrafter"])
def test_unknown_cache(owner):
    make = {"SpeculativeDecoder": SpeculativeDecoder, "DraftModelDrafter": DraftModelDrafter}[owner]
    with pytest.raises(ValueError, match=f"{owner}: cache must be one of ragged, paged, got 'linear'"):
        make(tiny("llama"), cache="linear")
    with pytest.raises(ValueError, match=f"{owner}: page_size must be an int >= 1, got 0"):
        make(tiny("llama"), cache="paged", page_size=0)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_forked_request_goes_its_own_way(kind):
    """A shared prompt, two continuations: each one's logits are those of its own text."""
    model = tiny(kind)
    forward = ModelForward(model)
    cache = forward.new_cache(2, 32, "paged", page_size=4)
    prompt = torch.randint(64, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    forward(torch.tensor([prompt, [0] * 13]), [13, 1], cache)
    cache.advance([13, 0])
    cache.fork(0, 1)
    texts = [list(prompt), list(prompt)]
    for step in ([[3, 9], [11, 4]], [[1], [2]], [[5, 6, 7], [8, 9, 10]]):
        logits = forward(torch.tensor(step), [len(step[0])] * 2, cache, last_only=True).logits
        cache.advance([len(step[0])] * 2)
        cache.pages.check()
        for text, new, got in zip(texts, step, logits, strict=True):
            text += new
            torch.testing.assert_close(got, recompute(model, text)[-1], atol=2e-4, rtol=0)


@pytest.mark.model
def test_same_text_on_smollm2():
    model, tokenizer = smollm2()
    ids = chat(tokenizer, "Repeat after me: one two three four, one two three four.")
    params = sampling(1, temperature=0.7, top_p=0.9)
    results = []
    plain = SpeculativeDecoder(model, PromptLookupDrafter(), adaptive=False)
    for cache in ("ragged", "paged"):
        decoder = SpeculativeDecoder(model, PromptLookupDrafter(), adaptive=False, cache=cache, forward=plain.forward)
        results.append(decoder.generate(ids, params=params, max_new_tokens=24))
    assert_same_text(model, ids[0].tolist(), results[0].tokens[0], results[1].tokens[0], params)
    assert results[1].stats.accepted > 0
