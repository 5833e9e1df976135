"""The cache with a length per row, against recomputing every row from scratch."""

import pytest
import torch

from tests.smollm2_fixture import TINY, WINDOW, recompute, tiny, transformers

from specdec_kernels.decoding import ModelForward, RaggedCache, UnsupportedModel  # isort: skip
from specdec_kernels.decoding.forward import row_positions  # isort: skip


@torch.inference_mode()
def play(model, prompts, steps, kind="ragged"):
    """Feeds the prompts, then each step's tokens and rollbacks per row; every row of logits against `recompute`.

    steps: list of (tokens per row, list of lists; entries to roll back per row).
    """
    forward = ModelForward(model)
    texts = [list(p) for p in prompts]
    cache = forward.new_cache(len(texts), 4, kind, page_size=4)  # small: grows while decoding
    feeds = [(texts, [0] * len(texts)), *steps]
    texts = [[] for _ in texts]
    for tokens, dropped in feeds:
        counts = [len(t) for t in tokens]
        width = max(counts)
        feed = torch.tensor([list(t) + [0] * (width - len(t)) for t in tokens])
        logits = forward(feed, counts, cache).logits
        expected = torch.cat(
            [recompute(model, text + list(t))[len(text) :] for text, t in zip(texts, tokens, strict=True)]
        )
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
        cache.advance(counts)
        cache.rollback(dropped)
        for text, t, d in zip(texts, tokens, dropped, strict=True):
            text += list(t)[: len(t) - d]
        if kind == "paged":
            cache.pages.check()
    assert cache.lengths == [len(t) for t in texts]


CACHES = pytest.mark.parametrize("cache", ["ragged", "paged"])


@CACHES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", TINY)
def test_ragged_rollback(kind, attention, cache):
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(64, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(5), draw(12), draw(9)]
    steps = [
        ([draw(4), draw(1), draw(3)], [3, 0, 1]),
        ([draw(2), draw(6), draw(6)], [0, 5, 2]),
        ([draw(1), draw(1), draw(1)], [0, 0, 0]),
        ([draw(3), draw(3), draw(3)], [2, 2, 2]),
    ]
    play(tiny(kind, attention=attention), prompts, steps, cache)


@CACHES
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_sliding_window_rollback(kind, cache):
    """A rollback brings entries back into the window that the dropped tokens had pushed out of it."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randint(64, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(3 * WINDOW), draw(WINDOW + 1)]
    steps = [
        ([draw(WINDOW), draw(WINDOW)], [WINDOW - 1, WINDOW]),
        ([draw(2), draw(2)], [0, 1]),
        ([draw(WINDOW + 2), draw(3)], [WINDOW + 1, 0]),
        ([draw(1), draw(1)], [0, 0]),
    ]
    play(tiny(kind), prompts, steps, cache)


def test_silent_noncroppable():
    """Whatever cannot be rolled back is refused by name, before any text depends on it."""
    configs = [
        (transformers.MambaConfig(), "mamba"),
        (transformers.BloomConfig(), "ALiBi"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (transformers.Llama4TextConfig(), "chunked"),
        (transformers.FalconConfig(alibi=True), "ALiBi"),
        (transformers.GPTNeoConfig(), "local attention"),
        *([(transformers.DoryConfig(), "loops")] if hasattr(transformers, "DoryConfig") else []),
    ]
    for config, reason in configs:
        with pytest.raises(UnsupportedModel, match=reason) as error:
            RaggedCache(config, 1)
        assert config.model_type in str(error.value)

    cache = RaggedCache(tiny("llama").config, 2)
    cache.advance([3, 5])
    with pytest.raises(ValueError, match=r"tokens_to_remove must be <= 0, got 2"):
        cache.crop(2)
    with pytest.raises(ValueError, match=r"counts\[0\] must be in \[0, 3\], got 4"):
        cache.rollback([4, 0])
    with pytest.raises(ValueError, match=r"counts\[1\] must be in \[0, 5\], got -1"):
        cache.rollback([0, -1])
    assert cache.lengths == [3, 5], "a refused rollback changes nothing"
    cache.crop(-2)
    assert cache.lengths == [1, 3]


@pytest.mark.parametrize("kind", ["Bart", "RoFormer"])
def test_models_without_position_ids_are_refused(kind):
    """Their forward takes position_ids among its **kwargs and counts positions by the cache's scalar length."""
    sizes = {"vocab_size": 64, "is_decoder": True}
    if kind == "Bart":
        sizes |= {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.is_encoder_decoder = False
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(UnsupportedModel, match=rf"{kind}ForCausalLM .*takes no position_ids"):
        ModelForward(model)


@pytest.mark.parametrize(("kind", "reason"), [("Roberta", "positions count from"), ("OpenAIGPT", "takes no cache")])
def test_models_that_number_or_cache_otherwise_are_refused(kind, reason):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, is_decoder=True)
    name = "OpenAIGPTLMHeadModel" if kind == "OpenAIGPT" else f"{kind}ForCausalLM"
    with pytest.raises(UnsupportedModel, match=f"{name} .*{reason}"):
        ModelForward(getattr(transformers, name)(config))


def test_padding_repeats_the_last_position():
    cache = RaggedCache(tiny("llama").config, 2)
    cache.advance([5, 2])
    index, positions = row_positions(cache, [1, 3], 3, torch.device("cpu"))
    assert index.tolist() == [[5, 6, 7], [2, 3, 4]]
    assert positions.tolist() == [[5, 5, 5], [2, 3, 4]]


def test_unsupported_attention_implementation():
    model = tiny("llama", seed=5)
    before = model.config._attn_implementation
    model.config._attn_implementation = "flex_attention"
    try:
        with pytest.raises(UnsupportedModel, match="flex_attention"):
            ModelForward(model)
    finally:
        model.config._attn_implementation = before


@torch.inference_mode()
@CACHES
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_selected_rows_keep_their_entries(kind, cache):
    model = tiny(kind)
    forward = ModelForward(model)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(64, (4, 11), generator=generator)
    counts = [11, 4, 7, 9]
    cache = forward.new_cache(4, 16, cache)
    forward(tokens, counts, cache)
    cache.advance(counts)
    for keep in ([0, 2, 3], [1, 2]):
        cache.select_rows(keep)
        counts, tokens = [counts[i] for i in keep], tokens[keep]
        assert cache.lengths == counts
        feed = torch.randint(64, (len(keep), 2), generator=generator)
        got = forward(feed, [2] * len(keep), cache, last_only=True).logits
        for b, n in enumerate(counts):
            expected = recompute(model, tokens[b, :n].tolist() + feed[b].tolist())[-1]
            torch.testing.assert_close(got[b], expected, atol=2e-4, rtol=0)


@torch.inference_mode()
@CACHES
def test_cache_grows_without_losing_entries(cache):
    model = tiny("llama")
    forward = ModelForward(model)
    text = torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(4))
    cache = forward.new_cache(1, 2, cache)
    for begin in range(0, 300, 60):
        logits = forward(text[:, begin : begin + 60], [60], cache).logits
        cache.advance([60])
    torch.testing.assert_close(logits, recompute(model, text[0].tolist())[240:], atol=3e-4, rtol=0)
