"""Files of trained drafters: what is written is what is read, and what does not fit or is not whole is refused by name."""

import json

import pytest
import torch

from tests.smollm2_fixture import tiny, transformers
from tests.test_trained_drafters import KEPT, eagle, flashspec

from specdec_kernels.decoding import FlashSpecModel, load_drafter_part  # isort: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("make", [eagle, flashspec])
def test_files(make, dtype, tmp_path):
    model = tiny("llama")
    part = make(model, draft_ids=KEPT)
    part.save(tmp_path, dtype=dtype, about={"seed": 3})
    back = load_drafter_part(tmp_path, model)
    assert type(back) is type(part) and back.options == part.options and back.draft_ids.tolist() == KEPT
    for name, tensor in part.tensors().items():
        got = back.tensors()[name]
        if dtype == "float32" or not tensor.is_floating_point():
            assert torch.equal(got, tensor), name
        elif dtype == "float16":
            torch.testing.assert_close(got, tensor.half().float(), atol=0, rtol=0)
        elif tensor.dim() == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127
            assert ((got - tensor).abs() <= step * 0.51).all(), name
    assert json.loads((tmp_path / "config.json").read_text())["about"] == {"seed": 3}


def test_files_that_do_not_fit(tmp_path):
    model = tiny("llama")
    eagle(model).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="made for a target with model_type llama, got qwen3"):
        load_drafter_part(tmp_path, tiny("qwen3"))
    with pytest.raises(ValueError, match="made for a target with vocab_size 64, got 6"):
        load_drafter_part(tmp_path, tiny("llama", vocab=6))
    for cut in (weights[:-9], weights[:40], weights[:-1] + bytes([weights[-1] ^ 1])):
        (tmp_path / "model.safetensors").write_bytes(cut)
        with pytest.raises(ValueError, match="truncated or changed: sha256 must be"):
            load_drafter_part(tmp_path, model)
    (tmp_path / "model.safetensors").write_bytes(weights)
    for change, message in (
        ({"drafter": "medusa"}, "config.json must be of a drafter .* got 'medusa'"),
        ({"options": {"taps": [-1], "intermediate_size": 32}}, r"wrong or missing: \['stack.decoder.layers.0.mlp"),
        ({"options": {"taps": [0, 1], "intermediate_size": None}}, r"wrong or missing: \['fuse.weight"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            load_drafter_part(tmp_path, model)
    for key in ("target", "options", "sha256"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        with pytest.raises(ValueError, match=f"config.json must have '{key}', got None"):
            load_drafter_part(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config | {"options": {"depth": 3}}))
    with pytest.raises(ValueError, match=r"options of config.json do not fit: .*depth"):
        load_drafter_part(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config)[:50])
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        load_drafter_part(tmp_path, model)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        load_drafter_part(tmp_path, model)


def test_tokenizers_are_compared(tmp_path):
    class Tokenizer:
        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {word: i for i, word in enumerate(self.words)}

    model = tiny("llama")
    eagle(model).save(tmp_path, tokenizer=Tokenizer("a", "b"))
    load_drafter_part(tmp_path, model)
    load_drafter_part(tmp_path, model, Tokenizer("a", "b"))
    with pytest.raises(ValueError, match=r"made for a tokenizer with vocabulary .*, got "):
        load_drafter_part(tmp_path, model, Tokenizer("b", "a"))


@torch.inference_mode()
def test_flashspec_starts_as_the_target_without_its_last_layers():
    """Shared layers and adapters of a new part are the target cut behind them; near its end, the last ones once more."""
    config = transformers.LlamaConfig(**tiny("llama").config.to_diff_dict() | {"num_hidden_layers": 5})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(12)[None]
    for shared, kept in ((1, [0, 1, 2]), (3, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3, 4, 4])):
        part = FlashSpecModel(model, shared=shared, adapters=2)
        x = model.model.embed_tokens(tokens)
        position = torch.arange(12)[None]
        rope = model.model.rotary_emb(x, position)
        mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
        for i in kept:
            x = model.model.layers[i](x, attention_mask=mask, position_ids=position, position_embeddings=rope)
        want = model.model.norm(x)
        got = part.finish(part.stack(model.model.embed_tokens(tokens), mask, position))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
