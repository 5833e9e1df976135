"""Attention over pages by FlashInfer's wrapper, whose documented behaviour a stand-in computes in plain torch here: what is checked
is what the wrapper is handed."""

import sys
import types

import pytest
import torch

from tests.smollm2_fixture import WINDOW, assert_same_text, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels.decoding import DraftModelDrafter, ModelForward, SpeculativeDecoder, paged_attention  # isort: skip


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper of FlashInfer 0.7: request by request, in float32."""

    plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
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
    paged_attention.register()
    return StandIn


@pytest.fixture
def paged(wrapper):
    """Makes a tiny model whose attention reads pages."""
    models = []

    def make(kind, **options):
        model = tiny(kind, **options)
        models.append((model, model.config._attn_implementation))
        model.set_attn_implementation(paged_attention.NAME)
        return model

    yield make
    for model, before in models:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_same_text_as_gathered(kind, paged):
    """Rows of different lengths, padding, windows that texts have passed, GQA: as with the model's own attention."""
    texts = prompts()
    ids, mask = padded(texts, "left")
    params = sampling(3, top_p=0.95)
    options = {"adaptive": False, "packed": False, "cache": "paged", "page_size": 4}
    draft = DraftModelDrafter(tiny(kind, seed=9), packed=False)
    want = SpeculativeDecoder(tiny(kind), draft, **options).generate(ids, mask, params, max_new_tokens=3 * WINDOW)
    model = paged(kind)
    got = SpeculativeDecoder(model, draft, **options).generate(ids, mask, params, max_new_tokens=3 * WINDOW)
    model.set_attn_implementation("sdpa")
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, got.tokens[b], want.tokens[b], params, b)
    assert StandIn.plans, "the pages were read by the model's own attention"


@torch.inference_mode()
def test_layers_share_a_plan(paged):
    for kind, plans in (("llama", 1), ("gemma3", 2)):
        forward = ModelForward(paged(kind))
        StandIn.plans = 0
        forward(torch.zeros(2, 3, dtype=torch.int64), [3, 2], forward.new_cache(2, 8, "paged"))
        assert StandIn.plans == plans, kind


def test_softcap_and_sinks():
    """They are passed on, or refused: a softmax without them would be another model."""
    module = torch.nn.Module()
    query = torch.zeros(1, 2, 1, 4)
    seen = []
    stand_in = types.SimpleNamespace(attend=lambda rows, *rest: seen.append(rest) or rows)
    with paged_attention.serving(stand_in):
        paged_attention._attention(module, query, 1, 2, None, scaling=0.5, sliding_window=8, softcap=30.0)
        paged_attention._attention(module, query, 1, 2, None)
        with pytest.raises(RuntimeError, match="specdec_paged: Module has learned sinks"):
            paged_attention._attention(module, query, 1, 2, None, s_aux=torch.zeros(2))
    assert seen == [(1, 2, 0.5, 8, 30.0), (1, 2, 0.5, 0, 0.0)]


def test_wrong_use(paged, monkeypatch):
    model = paged("llama")
    with pytest.raises(ValueError, match='"specdec_paged" needs cache="paged", got \'ragged\''):
        ModelForward(model).new_cache(1, 8)
    with pytest.raises(RuntimeError, match='inside a decoder with cache="paged"'):
        model(torch.zeros(1, 2, dtype=torch.int64))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        paged_attention.register()
