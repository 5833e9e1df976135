"""Transformers' own caches after `CacheRollback`, against forwards over the kept text alone."""

import doctest
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.smollm2_fixture import WINDOW, recompute, tiny, transformers

from specdec_kernels.decoding import CacheRollback, UnsupportedModel, rollback, rollback_attention_mask  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")
cache_utils = transformers.cache_utils
ATTENTION = ("llama", "qwen3", "mistral", "gemma3", "llama4")
HYBRIDS = ("qwen3_next", "falcon_h1", "lfm2", "mamba2")
LENGTH = 64
DOCS = Path(__file__).parents[1] / "docs" / "caches.md"


@cache
@torch.inference_mode(False)
def small(kind):
    """A random model: `tiny`, one of chunked attention, or one with recurrent layers."""
    if kind in ("llama", "qwen3", "mistral", "gemma3"):
        return tiny(kind)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "llama4":
        types = ["chunked_attention", "full_attention"]
        config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=WINDOW, layer_types=types, moe_layers=[])
    elif kind == "qwen3_next":
        config = transformers.Qwen3NextConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    elif kind == "falcon_h1":
        config = transformers.FalconH1Config(
            **sizes, mamba_d_ssm=64, mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_chunk_size=4
        )
    elif kind == "lfm2":
        config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
    else:
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": None}
        config = transformers.Mamba2Config(**sizes, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=4)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def make_cache(model, storage, length=LENGTH):
    if storage == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=length)
    # "lazy": plain full-length layers, made by the first forward.
    return transformers.DynamicCache(config=None if storage == "lazy" else model.config)


def argument(model):
    """The name under which this model and version take a cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)


class Loop:
    """What a user's loop holds: the cache, its mask, and each row's text. trim: rollbacks are given the mask."""

    def __init__(self, model, storage, prompts, trim=False, length=LENGTH):
        self.model = model
        self.trim = trim
        self.cache = make_cache(model, storage, length)
        self.step = CacheRollback(self.cache, model.config)
        self.texts = [list(p) for p in prompts]
        width = max(len(p) for p in prompts)
        padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], dtype=torch.int64)
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.int64)
        if width:
            self.forward(padded, self.mask)

    def forward(self, tokens, mask):
        arguments = {argument(self.model): self.cache, "use_cache": True}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return self.model(tokens, attention_mask=mask, **arguments).logits

    def verify(self, tokens, rejected, told=False):
        """One verify forward against recomputing, and its rollback; returns what that does."""
        tokens = torch.tensor(tokens)
        batch, count = tokens.shape
        self.step.begin(count if told or self.model.config.model_type == "mamba2" else None)
        before = self.mask.shape[1]
        mask = torch.cat((self.mask, torch.ones_like(tokens)), 1)
        logits = self.forward(tokens, mask)
        for b, text in enumerate(self.texts):
            expected = recompute(self.model, text + tokens[b].tolist())[len(text) :]
            torch.testing.assert_close(logits[b], expected, atol=2e-4, rtol=0)
        self.replayed = []

        def replay(start, stop):
            self.replayed.append((start, stop))
            self.forward(tokens[:, start:stop], mask[:, : before + stop])

        given = mask.clone()
        out = self.step.rollback(rejected, attention_mask=mask if self.trim else None, replay=replay)
        self.mask = out if self.trim else rollback_attention_mask(mask, rejected)
        assert torch.equal(mask, given)
        counts = [rejected] * batch if isinstance(rejected, int) else list(rejected)
        for b, text in enumerate(self.texts):
            text += tokens[b].tolist()[: count - counts[b]]
        assert self.mask.sum(1).tolist() == [len(text) for text in self.texts]
        if self.trim:
            assert self.mask.shape[1] == max(map(len, self.texts))
        for layer in self.cache.layers:
            if isinstance(layer, cache_utils.CacheLayerMixin):
                assert int(layer.get_seq_length()) == self.mask.shape[1]
        return out


def draw(generator, batch, count):
    return torch.randint(64, (batch, count), generator=generator).tolist()


@torch.inference_mode()
def play(kind, storage, lengths, steps, told=False, trim=False):
    """steps: (tokens per row, rejected), the last one rejecting nothing shows the state that the others left."""
    generator = torch.Generator().manual_seed(7)
    prompts = [draw(generator, 1, n)[0] for n in lengths]
    loop = Loop(small(kind), storage, prompts, trim)
    for count, rejected in steps:
        loop.verify(draw(generator, len(lengths), count), rejected, told)
    return loop


UNIFORM = [(4, 3), (2, 0), (5, 5), (1, 1), (6, 2), (3, 3), (1, 0), (4, 1), (3, 0)]
RAGGED = [
    (4, [3, 0, 1]),
    (2, [0, 0, 2]),
    (5, [5, 5, 5]),
    (6, [1, 6, 3]),
    (1, [1, 0, 1]),
    (7, [0, 6, 7]),
    (2, [0, 0, 0]),
]


@pytest.mark.parametrize("storage", ["dynamic", "static", "lazy"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_rollback(kind, storage):
    play(kind, storage, [3], UNIFORM)
    play(kind, storage, [2 * WINDOW + 1], UNIFORM, told=True)


@torch.inference_mode()
@pytest.mark.parametrize("storage", ["dynamic", "static", "lazy"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_ragged_rollback(kind, storage):
    play(kind, storage, [5, 2, 4], RAGGED)
    play(kind, storage, [5, 2, 4], RAGGED, trim=True)
    play(kind, storage, [19, 12, 3], RAGGED, told=True, trim=True)
    loop = play(kind, storage, [12, 19, 3], RAGGED)
    shift = loop.verify([[1, 2, 3]] * 3, torch.tensor([1, 3, 2], dtype=torch.int32))
    assert shift.tolist() == [0, 2, 1]
    assert shift.dtype == torch.int64


@pytest.mark.parametrize("storage", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_sliding_window_rollback(kind, storage):
    """At each length around the window's: the entries that the rejected tokens pushed out are needed again."""
    for length in range(WINDOW - 4, WINDOW + 2):
        for rejected in ([7, 2], [4, 7], [3, 3]):
            steps = [(7, rejected), (1, [0, 0])]
            play(kind, storage, [length, length - 2], steps, told=length % 2 == 0)
            play(kind, storage, [length - 2, length], steps, told=length % 2 == 1, trim=True)


@torch.inference_mode()
@pytest.mark.parametrize("storage", ["dynamic", "static"])
@pytest.mark.parametrize("kind", [*ATTENTION, *HYBRIDS])
def test_padding_grows_without_bound(kind, storage):
    """Rows that reject in turns: given the mask, a static cache with room for the longest row and one step suffices."""
    generator = torch.Generator().manual_seed(3)
    loop = Loop(small(kind), storage, draw(generator, 2, 3), trim=True, length=24)
    for i in range(8):
        loop.verify(draw(generator, 2, 5), [5, 1] if i % 2 else [1, 5], told=True)
    loop.verify(draw(generator, 2, 5), [0, 0], told=True)


def test_only_leading_columns_go():
    for dtype, mask, expected in [
        (torch.bool, [[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0]], [[1, 0, 1, 0], [0, 0, 1, 0]]),
        (torch.float32, [[0] * 6] * 2, [[], []]),
    ]:
        cache = transformers.DynamicCache()
        step = CacheRollback(cache)
        step.begin()
        entries = torch.arange(12.0).view(2, 1, 6, 1)
        cache.update(entries, entries, 0)
        mask = torch.tensor(mask, dtype=dtype)
        out = step.rollback(0, attention_mask=mask)
        assert torch.equal(out, torch.tensor(expected, dtype=dtype)) and out.is_contiguous()
        assert torch.equal(cache.layers[0].keys, entries[:, :, 6 - out.shape[1] :])
    step = CacheRollback(transformers.DynamicCache())
    step.begin()  # no forward: the cache knows neither rows nor lengths
    assert step.rollback(0, attention_mask=torch.zeros(3, 0)).shape == (3, 0)


@torch.inference_mode()
@pytest.mark.parametrize("storage", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "llama4"])
def test_padding_of_a_prompt(kind, storage):
    """Columns go back into a window that was full, and where the forward was longer than the window as well."""
    for length, padding in [(3 * WINDOW, 4), (WINDOW + 2, 4), (WINDOW, 1), (3, 2)]:
        loop = Loop(small(kind), storage, [[], []], trim=True)
        tokens = torch.ones(2, padding + length, dtype=torch.int64)
        mask = (torch.arange(padding + length) >= torch.tensor([[padding + 1], [padding]])).to(torch.int64)
        loop.step.begin()
        loop.forward(tokens, mask)
        loop.mask = loop.step.rollback(0, attention_mask=mask)
        assert loop.mask.tolist() == [[0] + [1] * (length - 1), [1] * length]
        loop.texts = [[1] * (length - 1), [1] * length]
        loop.verify([[1, 2, 3], [4, 5, 6]], [1, 3])
        loop.verify([[7, 8], [9, 10]], 0)


@pytest.mark.parametrize("storage", ["dynamic", "static"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_state_not_rolled_back(kind, storage):
    if (kind, storage) in (("mamba2", "static"), ("lfm2", "static")):
        pytest.skip("the same layers as in a dynamic cache")
    play(kind, storage, [2], UNIFORM)
    play(kind, storage, [6, 11, 3], RAGGED, trim=True)
    loop = play(kind, storage, [6, 11, 3], RAGGED)
    with torch.inference_mode():
        loop.verify([[1, 2, 3, 4, 5]] * 3, [5, 3, 0])
        assert loop.replayed == [(0, 2), (2, 5)], "once for each count of kept tokens"
        loop.verify([[1, 2]] * 3, [2, 2, 2])
        assert loop.replayed == []
        loop.verify([[1, 2]] * 3, 0)
        assert loop.replayed == []


@torch.inference_mode()
@pytest.mark.parametrize("storage", ["dynamic", "lazy"])
@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "llama", "mistral"])
def test_everything_rejected_of_a_first_forward(kind, storage):
    """The cache is empty again, whatever layers and states the forward has made."""
    if storage == "lazy" and kind in HYBRIDS:
        pytest.skip("transformers makes no recurrent layers lazily")
    for trim in (False, True):
        loop = Loop(small(kind), storage, [[], []], trim)
        loop.verify([[1, 2, 3], [4, 5, 6]], 3)
        for layer in loop.cache.layers:
            if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
                assert not any(layer.has_previous_state.values())
        loop.verify([[1, 2, 3], [4, 5, 6]], [3, 1])  # row 0 is empty still
        loop.verify([[7, 8], [9, 10]], 0)
        loop.verify([[1], [2]], 0)


@pytest.mark.parametrize("storage", ["dynamic", "static"])
def test_storage_and_modes(storage):
    """Static buffers and counters keep their addresses; tensors of either grad mode can be changed in the other."""
    for kind in ("mistral", "llama"):
        # Rows of one length, of which one rejects more: the second step has padding to drop.
        loop = Loop(small(kind), storage, [[1] * 9, [2] * 9], trim=True)  # outside of inference mode, with autograd on
        layer = loop.cache.layers[0]
        places = [t.data_ptr() for t in (layer.keys, layer.values)]
        loop.verify([[1, 2, 3], [4, 5, 6]], [1, 3])
        assert not layer.keys.is_inference()
        with torch.inference_mode():
            loop.verify([[1, 2, 3], [4, 5, 6]], [3, 1])
        if storage == "static":
            counter = layer.cumulative_length
            loop.verify([[1, 2, 3], [4, 5, 6]], [2, 1])
            assert places == [t.data_ptr() for t in (layer.keys, layer.values)]
            assert counter is layer.cumulative_length
            assert int(counter) == min(loop.mask.shape[1], layer.keys.shape[2])
    with torch.inference_mode():
        loop = Loop(small("gemma3"), storage, [[1] * 9, [2] * 5])
        loop.step.begin()
        mask = torch.cat((loop.mask, torch.ones(2, 3, dtype=torch.int64)), 1)
        loop.forward(torch.ones(2, 3, dtype=torch.int64), mask)
    loop.step.rollback([1, 2])  # tensors of inference mode, changed outside of it


def test_silent_noncroppable():
    """What cannot be rolled back is refused by name, before or instead of leaving the cache as it is."""
    config = tiny("llama").config

    class OwnLayer(cache_utils.DynamicLayer):
        pass

    class OwnCache(transformers.DynamicCache):
        pass

    quantized = object.__new__(cache_utils.QuantoQuantizedLayer)
    recording = transformers.DynamicCache(config=tiny("mistral").config)
    recording.activate_past_recording()
    offloading = transformers.DynamicCache(config=config)
    offloading.offloading = True
    crossing = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    for unfit, reason in [
        (cache_utils.Cache(layers=[OwnLayer()]), r"layer 0 \(OwnLayer\).*unknown class"),
        (cache_utils.Cache(layers=[cache_utils.DynamicLayer(), quantized]), r"layer 1 \(QuantoQuantizedLayer\).*quantised"),
        (cache_utils.Cache(layers=[cache_utils.DynamicIndexedLayer()]), r"layer 0 \(DynamicIndexedLayer\).*indexer"),
        (cache_utils.Cache(layers=[cache_utils.DynamicSlidingWindowLayer(1)]), "window of 1 token"),
        (recording, r"layer 0 \(DynamicSlidingWindowLayer\).*crop"),
        (OwnCache(), "OwnCache"),
        (offloading, "offloading DynamicCache"),
        (crossing, "EncoderDecoderCache.*cross-attention"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedModel, match=reason):
            CacheRollback(unfit)
    step = CacheRollback(transformers.DynamicCache())
    step.cache.layers.append(OwnLayer())
    with pytest.raises(UnsupportedModel, match="OwnLayer"):
        step.begin()


def test_recurrent_models_are_refused_by_name():
    """Some models' forward over several tokens is wrong with a cached state, so they cannot verify at all."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    mamba = transformers.MambaConfig(**sizes, state_size=8)
    limited = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=8, n_groups=1, time_step_limit=(0.1, 0.5))
    unknown = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=8, n_groups=1)
    unknown.model_type = "somebodys_mamba"
    nemotron = transformers.NemotronHConfig()
    for config, reason in [
        (mamba, "model type 'mamba' is not supported.*empty state"),
        (limited, "time_step_limit"),
        (unknown, "'somebodys_mamba' is not supported: not checked"),
        (nemotron, "does not clamp"),
        (None, "config must be the model's config"),
    ]:
        cache = transformers.DynamicCache(config=mamba if config in (None, unknown) else config)
        with pytest.raises(ValueError, match=reason):
            CacheRollback(cache, config)
    # The fault itself: where this passes, transformers has mended it and the model can be admitted.
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(mamba).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    text = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(1))
    parameter = argument(model)
    cache = transformers.DynamicCache(config=mamba)
    with torch.inference_mode():
        model(text[:, :8], **{parameter: cache}, use_cache=True)
        found = model(text[:, 8:], **{parameter: cache}, use_cache=True).logits[0]
        assert (found - recompute(model, text[0].tolist())[8:]).abs().max() > 0.1


@torch.inference_mode()
def test_refused_rollbacks_change_nothing():
    loop = Loop(small("gemma3"), "dynamic", [[1, 2, 3, 4], [5, 6, 7]])
    with pytest.raises(RuntimeError, match=r"begin\(\) must be called before"):
        loop.step.rollback(1)
    with pytest.raises(ValueError, match="num_tokens must be >= 1 or None, got int 0"):
        loop.step.begin(0)
    with pytest.raises(ValueError, match=r"config must be the model's config .*, got a Gemma3ForCausalLM"):
        CacheRollback(loop.cache, loop.model)
    ones = lambda n: torch.ones(2, n, dtype=torch.int64)  # noqa: E731
    loop.step.begin()
    mask = torch.cat((loop.mask, ones(3)), 1)
    loop.forward(ones(3), mask)
    kept = [layer.keys for layer in loop.cache.layers]
    for bad, reason in [
        ([0, 4], r"num_rejected\[1\] must be in \[0, 3\], the tokens that can be dropped, got 4"),
        (-1, r"num_rejected\[0\] must be in \[0, 3\]"),
        ([1], "num_rejected must be of B=2 rows, got 1"),
        (1.0, r"num_rejected must be an int, or ints \[B\], got float 1.0"),
        (torch.tensor([0.0, 1.0]), "num_rejected must be an int"),
    ]:
        with pytest.raises(ValueError, match=reason):
            loop.step.rollback(bad)
    for bad in (loop.mask, mask[:1], mask[..., None], mask.tolist()):
        with pytest.raises(
            ValueError, match=r"attention_mask must be a tensor \[2, 7\] over all tokens .*, the 3 since begin"
        ):
            loop.step.rollback(1, attention_mask=bad)
    assert all(layer.keys is old for layer, old in zip(loop.cache.layers, kept, strict=True))
    loop.step.rollback(1)
    with pytest.raises(RuntimeError, match="begin"):
        loop.step.rollback(1)
    loop.mask = mask[:, :-1]

    # More tokens than the window stores: the first of them are gone.
    loop.step.begin()
    loop.forward(ones(WINDOW), torch.cat((loop.mask, ones(WINDOW)), 1))
    with pytest.raises(
        RuntimeError, match=rf"layer 0 \(DynamicSlidingWindowLayer\) stores 7 entries and took {WINDOW}"
    ):
        loop.step.rollback([0, 1])
    loop.step.rollback(0)
    with pytest.raises(RuntimeError, match="begin"):
        loop.step.rollback(0)

    loop.step.begin(2)
    loop.forward(ones(3), torch.cat((loop.mask, ones(WINDOW + 3)), 1))
    with pytest.raises(RuntimeError, match=r"took 3 tokens, begin\(\) was told 2"):
        loop.step.rollback(1)
    loop.step.begin()
    loop.cache.layers[1].update(*[torch.zeros(2, 2, 1, 8)] * 2)
    with pytest.raises(RuntimeError, match=r"layer 0 .* took 0 tokens, layer 1 .* took 1 tokens"):
        loop.step.rollback(1)
    with pytest.raises(ValueError, match=r"attention_mask must be a tensor \[B, L\]"):
        rollback_attention_mask([[1, 1]], 1)


@torch.inference_mode()
def test_a_forward_that_cannot_be_taken_back_is_refused_before_it():
    room = r"at most 3: layer 0 \(StaticLayer\) has room for 3 more tokens, got 4"
    for storage, kind, most, reason in [
        ("dynamic", "mistral", WINDOW - 1, rf"at most 7: layer 0 \(DynamicSlidingWindowLayer\) stores 7 .*, got {WINDOW}"),
        ("static", "mistral", WINDOW, r"at most 8: layer 0 \(StaticSlidingWindowLayer\) stores 8 entries.*, got 9"),
        ("static", "llama", 3, room),
        ("static", "gemma3", 3, room.replace("0", "1", 1)),
        ("static", "falcon_h1", 3, room.replace("Static", "LinearAttentionAndStaticFullAttention", 1)),
    ]:  # fmt: skip
        loop = Loop(small(kind), storage, [[1] * 9, [2] * 8], trim=True, length=12)
        with pytest.raises(ValueError, match=f"num_tokens must be {reason}"):
            loop.step.begin(most + 1)
        with pytest.raises(RuntimeError, match=r"begin\(\) must be called before"):
            loop.step.rollback(0)
        loop.verify([[3] * most] * 2, [most, 1], told=True)
    # Shorter than the window: transformers would go on, and attend to the last tokens alone.
    loop = Loop(small("mistral"), "static", [[1] * 4, [2] * 3], trim=True, length=WINDOW - 1)
    with pytest.raises(ValueError, match=r"at most 3: layer 0 \(StaticSlidingWindowLayer\) has room for 3 more tokens"):
        loop.step.begin(4)
    loop.verify([[3] * 3] * 2, [3, 1], told=True)


def test_examples_of_the_docs():
    """They run as printed, and leave what forwards over the kept text alone would have."""
    section = DOCS.read_text().split("## transformers' own caches\n")[1]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), names)
        assert names["mask"].tolist() == [[1] * 5] * 2
        logits = names["forward"](torch.tensor([[7], [8]]), torch.ones(2, 6, dtype=torch.int64))
        for row, text in enumerate(([11, 12, 13, 14, 15, 7], [21, 22, 23, 24, 25, 8])):
            torch.testing.assert_close(logits[row], recompute(names["model"], text)[-1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("change", ["batch_select_indices", "batch_repeat_interleave"])
def test_rows_that_come_and_go_are_noticed(change):
    """Before anything has changed: a sliding layer's remembered entries are those of the old rows."""
    made = transformers.DynamicCache(config=small("gemma3").config)
    entries = torch.rand(3, 2, 12, 8)
    step = CacheRollback(made)
    for n in (12, 4):
        step.begin()
        for layer in range(2):
            made.update(entries[:, :, :n], entries[:, :, :n], layer)
    getattr(made, change)(torch.tensor([0, 2]) if change == "batch_select_indices" else 2)
    kept = [layer.keys.clone() for layer in made.layers]
    with pytest.raises(RuntimeError, match=r"the cache had 3 rows at begin\(\) and has (2|6): rows must stay"):
        step.rollback(2)
    for layer, keys in zip(made.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)


@torch.inference_mode()
@pytest.mark.parametrize("storage", ["dynamic", "static"])
def test_replay_is_needed_and_checked(storage):
    """A failing replay leaves the cache as it was at begin(): the next step's logits are still right."""
    loop = Loop(small("qwen3_next"), storage, [[1, 2, 3, 4], [5, 6, 7, 8]])
    ones = torch.ones(2, 3, dtype=torch.int64)
    mask = torch.cat((loop.mask, ones), 1)

    def attempt(replay, error, reason):
        loop.step.begin()
        loop.forward(ones, mask)
        with pytest.raises(error, match=reason):
            loop.step.rollback([1, 2], replay=replay)

    attempt(None, ValueError, r"replay is missing, and the state of layer 0 \(LinearAttentionLayer\)")
    loop.step.rollback(3)
    attempt(
        lambda a, b: loop.forward(ones, mask), RuntimeError, r"replay\(0, 1\) must feed 1 tokens, but layer 1 .* took 3"
    )

    def fails(start, stop):
        loop.forward(ones[:, start:stop], mask[:, : 4 + stop])
        if stop == 2:
            raise OSError("in the middle")

    attempt(fails, OSError, "in the middle")
    with pytest.raises(RuntimeError, match=r"begin\(\) must be called"):
        loop.step.rollback(1)
    loop.verify([[9, 10, 11], [12, 13, 14]], [1, 2])
    loop.verify([[9], [12]], 0)
    step = CacheRollback(make_cache(small("mamba2"), "dynamic"), small("mamba2").config)
    with pytest.raises(ValueError, match="num_tokens is missing, and no layer of this cache counts tokens"):
        step.begin()
    step.begin(2)
    with pytest.raises(
        ValueError, match=r"attention_mask must be a tensor \[B, L\] over all tokens in the cache, the 2"
    ):
        step.rollback(0, attention_mask=torch.ones(1, 1))


def test_doctests():
    result = doctest.testmod(rollback, extraglobs={"torch": torch})
    assert result.attempted > 0 and result.failed == 0
