"""The decoder's paged cache: the same text as with the ragged one, and pages that come and go with the tokens."""

import copy
import inspect

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, chat, recompute, smollm2, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftModelDrafter,
    ModelForward,
    PagedCache,
    PromptLookupDrafter,
    SpeculativeDecoder,
    UnsupportedModel,
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


def test_caches_are_run_by_a_model_forward():
    model = tiny("llama")
    for kind in ("ragged", "paged"):
        cache = ModelForward(model).new_cache(1, 8, kind)
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with pytest.raises(
            RuntimeError, match=r"Cache: a forward of 3 tokens per row, but reserve\(\) was called for None"
        ):
            model(torch.zeros(1, 3, dtype=torch.int64), **{argument: cache})


def test_storage_follows_the_texts():
    """Pages are made as they are needed, not for the longest text that there may be."""
    cache = ModelForward(tiny("llama")).new_cache(3, 10_000, "paged", page_size=4)
    cache.reserve([9, 1, 2], 9)
    assert cache.pages.num_pages == 5
    cache.advance([9, 1, 2])
    cache.reserve([4, 4, 4], 4)
    assert cache.pages.num_pages == 8
    cache.advance([4, 4, 4])
    cache.check()
    cache.pages.num_free.fill_(-50)
    cache.reserve([4, 4, 4], 4)
    with pytest.raises(RuntimeError, match=r"PagedCache: the pages. bookkeeping reported <CacheStatus\.OUT_OF_PAGES"):
        cache.check()


@torch.inference_mode()
def test_nan_row_stays_in_its_row():
    """A request whose keys and values are NaN, beside others that get its pages when it has left and pad to its length."""
    model = copy.deepcopy(tiny("llama"))
    model.model.embed_tokens.weight[63] = torch.nan
    greedy = SamplingTensors.create(temperature=0.0, seed=0, batch_size=3)
    draws = torch.Generator().manual_seed(0)
    # The last row's padding is written last; the first row ends at once, as a row without a number emits id 0.
    for lengths, bad in (((14, 3, 2), 2), ((14, 23, 8), 0)):
        rows = [torch.randint(63, (n,), generator=draws).tolist() for n in lengths]
        rows[bad] = [63] * lengths[bad]
        ids, mask = padded(rows, "left")
        ragged, paged = (
            SpeculativeDecoder(model, packed=False, cache=cache, page_size=4).generate(
                ids, mask, greedy, max_new_tokens=12, eos=[0]
            )
            for cache in ("ragged", "paged")
        )
        assert paged.tokens == ragged.tokens and paged.status == ragged.status
        assert [bool(status) for status in paged.status] == [b == bad for b in range(3)]


def test_forwards_that_fail_take_nothing():
    """The rollback of what an earlier forward left unused happens once."""
    model = tiny("llama")
    forward = ModelForward(model)
    cache = forward.new_cache(1, 64, "paged", page_size=4)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with torch.inference_mode():
        forward(tokens, [6], cache)
        cache.advance([6])
        forward(tokens[:, :2], [2], cache)
        for counts in ([1, 1], [3], [-1]):
            with pytest.raises(ValueError, match=r"PagedCache.reserve: counts must be 1 numbers in \[0, 2\], got "):
                cache.reserve(counts, 2)
        grow, cache.pages.grow = cache.pages.grow, None
        with pytest.raises(TypeError):
            cache.reserve([40], 40)
        cache.pages.grow = grow
        forward(tokens[:, :2], [2], cache)
    size = cache.pages.page_size
    assert [slot % size for slot in cache.slots[0].tolist()] == [2, 3]
    assert cache.pages.seq_lens.tolist() == [8]


@torch.inference_mode()
def test_wider_than_the_table():
    """A long row's tail beside a short row's many tokens."""
    model = tiny("llama")
    forward = ModelForward(model)
    cache = forward.new_cache(2, 8, "paged", page_size=4)
    tokens = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(6))
    forward(tokens[:, :7], [7, 1], cache)
    cache.advance([7, 1])
    got = forward(torch.stack([tokens[0, 7:], tokens[1, 1:4]]), [1, 3], cache).logits
    want = torch.cat([recompute(model, tokens[0, :8].tolist())[-1:], recompute(model, tokens[1, :4].tolist())[1:]])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


def test_rows_are_not_reordered():
    for kind in ("ragged", "paged"):
        cache = ModelForward(tiny("llama")).new_cache(2, 8, kind)
        for call in (cache.reorder_cache, cache.batch_select_indices, cache.batch_repeat_interleave):
            with pytest.raises(RuntimeError, match="Cache: rows cannot be reordered or repeated"):
                call(torch.tensor([1, 0]))


def test_model_spread_over_devices(monkeypatch):
    model = tiny("llama")
    cache = ModelForward(model).new_cache(1, 8, "paged")
    cache.reserve([1], 1)
    elsewhere = torch.zeros(1, 2, 1, 8, device="meta")
    with pytest.raises(UnsupportedModel, match="layer 0 is on meta, the cache on cpu"):
        cache.update(elsewhere, elsewhere, 0)


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


def masked(model, text, budget, sinks):
    """Logits [n, V] of a text whose tokens see the last `budget` tokens, their own included, and the first `sinks`."""
    at, key = torch.arange(len(text))[:, None], torch.arange(len(text))
    hidden = (key > at) | ((key <= at - budget) & (key >= sinks))
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
    return model(torch.tensor([text]), attention_mask=mask[None, None], use_cache=False).logits[0]


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_budget_is_what_queries_read(cache, sinks):
    """Over many verified blocks: rejected entries go, old ones too, and no more pages are held than the budget asks for."""
    model, budget, size = tiny("llama"), 9, 4
    forward = ModelForward(model)
    made = forward.new_cache(2, 8, cache, page_size=size, budget=budget, sinks=sinks)
    generator = torch.Generator().manual_seed(5)
    texts = [[], []]
    for step in range(14):
        new = torch.randint(64, (2, 5), generator=generator).tolist()
        counts = [5, 1 + step % 5]
        logits = forward(torch.tensor(new), counts, made).logits
        want = []
        for text, tokens, n in zip(texts, new, counts, strict=True):
            text += tokens[:n]
            want.append(masked(model, text, budget, sinks)[-n:])
        torch.testing.assert_close(logits, torch.cat(want), atol=2e-4, rtol=0)
        made.advance(counts)
        rejected = [step % 4, 0]
        made.rollback(rejected)
        made.evict()
        texts = [text[: len(text) - n] for text, n in zip(texts, rejected, strict=True)]
        if cache == "paged":
            made.pages.check()
            held = (made.pages.block_table >= 0).sum(1)
            assert (held <= -(-sinks // size) + -(-budget // size) + 1).all()
    assert min(made.lengths) > 3 * budget
    if cache == "paged":
        # What is gathered and what is allocated follow the budget too, not the text.
        assert made.gathered <= size * (-(-sinks // size) + -(-(budget + 5) // size) + 1) < min(made.lengths)
        assert made.pages.num_pages <= 2 * (-(-sinks // size) + -(-(budget + 5) // size) + 1) * 3 // 2
        lengths, table = list(made.lengths), made.pages.block_table.clone()
        with pytest.raises(RuntimeError, match=rf"row 1 back to {lengths[1] - 8} tokens needs entries from "):
            made.rollback([0, 8])
        assert made.lengths == lengths and torch.equal(made.pages.block_table, table)
        # Rolled back to before what was evicted, and filled again: every page is there for it.
        made.reset()
        assert made._evicted == [0, 0]
        forward(torch.zeros(2, 50, dtype=torch.int64), [50, 50], made)
        made.advance([50, 50])
        made.check()
        made.reset()
        made.pages.check()
        assert int(made.pages.num_free) == made.pages.num_pages


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_drafter_on_a_budget(rule):
    """The same drafts from both caches; under `coupled` the same text as without a budget."""
    model = tiny("qwen3")
    texts = prompts()
    ids, mask = padded(texts, "left")
    params = sampling(3, top_p=0.95)
    results = []
    for cache, budget in (("ragged", None), ("ragged", 12), ("paged", 12)):
        drafter = DraftModelDrafter(
            tiny("qwen3", seed=9), packed=False, cache=cache, page_size=4, budget=budget, sinks=2 if budget else 0
        )
        decoder = SpeculativeDecoder(model, drafter, rule=rule, packed=False, adaptive=False)
        results.append(decoder.generate(ids, mask, params, max_new_tokens=NEW))
    full, ragged, paged = results
    assert ragged.stats.accepted == paged.stats.accepted
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, paged.tokens[b], ragged.tokens[b], params, b)
        if rule == "coupled":
            assert_same_text(model, prompt, paged.tokens[b], full.tokens[b], params, b)
    with pytest.raises(ValueError, match="DraftModelDrafter: budget must be an int >= 1 or None, got 0"):
        DraftModelDrafter(model, budget=0)
    for options in ({"budget": 4, "sinks": -1}, {"sinks": 3}):
        with pytest.raises(
            ValueError, match="DraftModelDrafter: sinks must be an int >= 0, and 0 without a budget, got"
        ):
            DraftModelDrafter(model, **options)


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
