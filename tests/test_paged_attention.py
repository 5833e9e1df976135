"""Attention over pages by FlashInfer's wrapper, whose documented behaviour a stand-in computes in plain torch here: what is checked
is what the wrapper is handed."""

import functools
import sys
import types

import pytest
import torch

from tests.smollm2_fixture import WINDOW, assert_same_text, tiny, transformers
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels.decoding import (  # isort: skip
    DraftModelDrafter, ModelForward, PackedForward, SpeculativeDecoder, UnsupportedModel, paged_attention,
)  # fmt: skip


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper of FlashInfer 0.7: request by request, in float32."""

    plans = made = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        StandIn.made += 1
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, *, head_dim_vo, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        StandIn.plans += 1
        for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert t.dtype == torch.int32 and t.is_contiguous()
        assert causal and len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.starts, self.blocks = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.pages, self.last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self.heads, self.kv_heads, self.page_size = num_qo_heads, num_kv_heads, page_size
        self.dims, self.dtypes = (head_dim_qk, head_dim_vo), (q_data_type, kv_data_type)
        self.scale, self.window, self.cap = sm_scale, window_left, logits_soft_cap

    def run(self, q, paged_kv_cache):
        keys, values = paged_kv_cache
        assert q.shape == (self.starts[-1], self.heads, self.dims[0])
        assert keys.shape[1:] == (self.page_size, self.kv_heads, self.dims[0]) and values.shape[3] == self.dims[1]
        assert (q.dtype, keys.dtype) == self.dtypes
        out = []
        for b, last in enumerate(self.last):
            begin, end = self.starts[b : b + 2]
            held = self.pages[self.blocks[b] : self.blocks[b + 1]]
            length = (len(held) - 1) * self.page_size + last
            k, v = (
                t[held].flatten(0, 1)[:length].repeat_interleave(self.heads // self.kv_heads, 1) for t in (keys, values)
            )
            score = torch.einsum("qhd,khd->hqk", q[begin:end], k) * self.scale
            if self.cap > 0:
                score = self.cap * torch.tanh(score / self.cap)
            at = torch.arange(length - (end - begin), length)[:, None]
            key = torch.arange(length)
            hidden = key > at
            if self.window >= 0:
                hidden |= key < at - self.window
            out.append(torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(out)


@pytest.fixture
def wrapper(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandIn, "plans", 0)
    # The stand-in computes in float32 on the CPU; the real one does neither.
    monkeypatch.setattr(paged_attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(paged_attention, "DTYPES", (torch.float32,))
    paged_attention.register()
    return StandIn


@functools.cache
@torch.inference_mode(False)
def windowed(kind):
    """Models that pass no window to the attention interface: one layer of two has it, or all have."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, "sliding_window": WINDOW,
    }  # fmt: skip
    if kind == "qwen2_moe":
        config = transformers.Qwen2MoeConfig(
            **sizes, use_sliding_window=True, max_window_layers=1, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, shared_expert_intermediate_size=16,
        )  # fmt: skip
    else:
        config = transformers.PhimoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def model_of(kind, **options):
    return windowed(kind) if kind in ("qwen2_moe", "phimoe") else tiny(kind, **options)


@pytest.fixture
def paged(wrapper):
    """Makes a tiny model whose attention reads pages."""
    models = []

    def make(kind, **options):
        model = model_of(kind, **options)
        models.append((model, model.config._attn_implementation))
        model.set_attn_implementation(paged_attention.NAME)
        return model

    yield make
    for model, before in models:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("budget", [None, 5])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3", "qwen2_moe", "phimoe"])
def test_same_text_as_gathered(kind, budget, paged):
    """Rows of different lengths, padding, windows that texts have passed, GQA, budgets: as with the model's own attention."""
    texts = prompts()
    ids, mask = padded(texts, "left")
    params = sampling(3, top_p=0.95)
    options = {"adaptive": False, "packed": False, "cache": "paged", "page_size": 4}

    def run():
        drafter = DraftModelDrafter(model_of(kind), packed=False, cache="paged", page_size=4, budget=budget)
        decoder = SpeculativeDecoder(model_of(kind), drafter, **options)
        return decoder.generate(ids, mask, params, max_new_tokens=3 * WINDOW)

    want = run()
    model = paged(kind)
    got = run()
    model.set_attn_implementation("sdpa")
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, got.tokens[b], want.tokens[b], params, b)
    assert StandIn.plans, "the pages were read by the model's own attention"
    assert (got.stats.acceptance_rate > 0.9) == (budget is None)


@torch.inference_mode()
def test_layers_share_a_plan(paged):
    for kind, plans in (("llama", 1), ("gemma3", 2)):
        forward = ModelForward(paged(kind))
        StandIn.plans = StandIn.made = 0
        cache = forward.new_cache(2, 8, "paged")
        forward(torch.zeros(2, 3, dtype=torch.int64), [3, 2], cache)
        assert StandIn.plans == plans, kind
        forward(torch.zeros(2, 3, dtype=torch.int64), [3, 2], cache)
        assert StandIn.plans == 2 * plans and StandIn.made == plans, (
            "wrappers are kept, plans are made for each forward"
        )


def test_what_a_layer_asks_for():
    """It is passed on, or refused: a softmax without it would be another model."""
    module = torch.nn.Module()
    module.layer_idx = 0
    query = torch.zeros(1, 2, 1, 4)
    seen = []
    stand_in = types.SimpleNamespace(windows=[8, 0], attend=lambda rows, *rest: seen.append(rest) or rows)
    call = functools.partial(paged_attention._attention, module, query, 1, 2)
    with paged_attention.Serving(stand_in):
        call(None, scaling=0.5, sliding_window=8, softcap=30.0)
        call(None, sliding_window=10)  # of a layer whose budget is less
        call(None)
        for options, message in (
            ({"s_aux": torch.zeros(2)}, "Module has learned sinks"),
            ({"is_causal": False}, "Module is not causal"),
            ({"attention_mask": torch.zeros(1)}, "Module masks on its own"),
            ({"sliding_window": 6}, "layer 0 has a window of 6, its config says 8"),
        ):
            mask = options.pop("attention_mask", None)
            with pytest.raises(RuntimeError, match=f"specdec_paged: {message}"):
                call(mask, **options)
        module.layer_idx = 1
        with pytest.raises(RuntimeError, match="layer 1 has a window of 6, its config says none"):
            call(None, sliding_window=6)
        module.layer_idx = None
        with pytest.raises(RuntimeError, match="Module has no layer_idx"):
            call(None)
    assert seen == [(1, 2, 0.5, 8, 30.0), (1, 2, 0.5, 8, 0.0), (1, 2, 0.5, 8, 0.0)]


def test_wrong_use(paged, monkeypatch):
    model = paged("llama")
    with pytest.raises(ValueError, match='"specdec_paged" needs cache="paged", got \'ragged\''):
        ModelForward(model).new_cache(1, 8)
    with pytest.raises(RuntimeError, match='inside a decoder with cache="paged"'):
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="PagedCache: sinks must be 0 for attention that reads pages, got 2"):
        ModelForward(model).new_cache(1, 8, "paged", budget=4, sinks=2)
    assert PackedForward.build(model) is None
    forward = ModelForward(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModel, match="was 'specdec_paged' when this forward was made and is 'sdpa' now"):
        forward(torch.zeros(1, 1, dtype=torch.int64), [1], forward.new_cache(1, 8, "paged"))
    model.set_attn_implementation(paged_attention.NAME)
    monkeypatch.setattr(paged_attention, "DEVICES", ("cuda",))
    with pytest.raises(UnsupportedModel, match='"specdec_paged" needs a model in float32 on cuda, got float32 on cpu'):
        ModelForward(model)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        paged_attention.register()
