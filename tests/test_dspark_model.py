"""DSpark's network and its checkpoints: the public layout in and out, and blocks against loops in float64."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig

from tests.dspark_cases import (
    KEPT,
    VOCAB,
    WIDTH,
    drafter_of,
    public_config,
    public_tensors,
    random_states,
    read,
    reference_block,
    write,
)
from tests.smollm2_fixture import tiny

from specdec_kernels.decoding import DSparkConfig, DSparkModel  # isort: skip
from specdec_kernels.decoding.dspark_forward import DSparkForward  # isort: skip

WINDOWED = {"sliding_window": 4, "use_sliding_window": True}
pytestmark = pytest.mark.usefixtures("one_thread")

SLIDING = ["sliding_attention"] * 2
KINDS = {
    "full": {},
    "bias": {"attention_bias": True},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": SLIDING, **WINDOWED},
    "both ways": {"layer_types": SLIDING, "is_causal": False, **WINDOWED, "sliding_window": 3},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], **WINDOWED},
}


@torch.no_grad()
def close(got, expected, limit=2e-5):
    error = float((got.double() - expected).abs().max())
    assert error < limit * float(expected.std()), error


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize(
    ("kind", "packed"), [(k, p) for k in KINDS for p in (True, False) if (k, p) != ("mixed", True)]
)  # packed layers are of one kind
def test_block_over_the_cache_is_the_block_from_scratch(tmp_path, kind, packed, cache):
    """Rows of different lengths take in context in uneven pieces; a block between them leaves no trace; a row leaves."""
    model, config, tensors = drafter_of(tmp_path, tiny("llama"), **KINDS[kind])
    forward = DSparkForward(model, packed, torch.float32)
    kept = forward.new_cache(3, 4, cache, 4)
    texts, anchors = [[] for _ in range(3)], [5, 40, 63]
    for step, counts in enumerate([[4, 1, 7], [1, 3, 2], [2, 2], [1, 1]]):
        if len(counts) < len(texts):
            kept.select_rows([0, 2])
            texts, anchors = [texts[0], texts[2]], [anchors[0], anchors[2]]
        states, parts = random_states(counts, seed=step)
        forward.append(states, counts, kept)
        texts = [[*t, part] for t, part in zip(texts, parts, strict=True)]
        assert kept.lengths == [sum(map(len, t)) for t in texts]
        got = forward.block(torch.tensor(anchors), kept, 4)
        assert kept.lengths == [sum(map(len, t)) for t in texts]
        for h, text, anchor in zip(got, texts, anchors, strict=True):
            close(h, reference_block(config, tensors, torch.cat(text), anchor)[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_text_in_one_forward(tmp_path, kind):
    """`forward_blocks` is what decoding computes block by block, and every parameter learns from it."""
    model, config, tensors = drafter_of(tmp_path, tiny("llama"), **KINDS[kind])
    _, (a, b) = random_states([9, 9])
    tokens = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[1, 4, 9, 4], [0, 8, 2, 7]])
    got = model.forward_blocks(torch.stack([a, b]), tokens, anchors)
    for row, states in enumerate((a, b)):
        for h, anchor in zip(got[row], anchors[row].tolist(), strict=True):
            close(h.detach(), reference_block(config, tensors, states[:anchor], int(tokens[row, anchor])))
    before = torch.zeros(got.shape[:-1], dtype=torch.int64)
    loss = model.block_logits(got, before).square().mean() + model.confidence_logits(got, before).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        frozen = name in ("embed_tokens.weight", "lm_head.weight")
        assert (parameter.grad is None) == frozen == (not parameter.requires_grad), name
        assert frozen or (parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0), name


def test_positions_of_the_text_count(tmp_path):
    """Rotations see differences alone: a text that starts elsewhere gives the same; one with a gap does not."""
    model, _, _ = drafter_of(tmp_path, tiny("llama"))
    states, tokens, anchors = torch.randn(1, 8, 2 * WIDTH), torch.arange(8)[None], torch.tensor([[3, 6]])
    plain = model.forward_blocks(states, tokens, anchors)
    moved = model.forward_blocks(states, tokens, anchors, torch.arange(8)[None] + 30)
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-4)
    gap = model.forward_blocks(states, tokens, anchors, torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11]]))
    torch.testing.assert_close(gap[:, 0], plain[:, 0])
    assert (gap[:, 1] - plain[:, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("reduced", [False, True])
def test_logits_are_head_and_bias(tmp_path, reduced):
    keys = {"draft_vocab_size": len(KEPT)} if reduced else {}
    model, _, tensors = drafter_of(tmp_path, tiny("llama"), logit_scale=0.5, **keys)
    h, before = torch.randn(3, WIDTH), torch.tensor([5, 0, 63])
    t = {name: tensor.double() for name, tensor in tensors.items()}
    w1 = t["markov_head.markov_w1.weight"][before]
    expected = 0.5 * (h.double() @ t["lm_head.weight"].T + w1 @ t["markov_head.markov_w2.weight"].T)
    torch.testing.assert_close(model.block_logits(h, before).double(), expected, rtol=1e-5, atol=1e-5)
    for packed in (True, False):
        torch.testing.assert_close(
            DSparkForward(model, packed, torch.float32).logits(h), model.base_logits(h), rtol=1e-5, atol=1e-5
        )
    features = torch.cat([h.double(), w1], -1)
    expected = (features @ t["confidence_head.proj.weight"].T + t["confidence_head.proj.bias"])[:, 0]
    torch.testing.assert_close(model.confidence_logits(h, before).double(), expected, rtol=1e-5, atol=1e-5)
    plain, _, _ = drafter_of(tmp_path / "plain", tiny("llama"), confidence_head_with_markov=False, **keys)
    proj = plain.confidence_head.proj
    torch.testing.assert_close(plain.confidence_logits(h, before), proj(h)[:, 0])
    assert proj.weight.shape == (1, WIDTH) and (model.kept_ids is not None) == reduced


def test_packed_copy_follows_the_weights(tmp_path):
    model, config, tensors = drafter_of(tmp_path, tiny("llama"))
    forward = DSparkForward(model, True, torch.float32)
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight.mul_(1.5)
    tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.1.mlp.up_proj.weight"] * 1.5
    forward.refresh()
    states, _ = random_states([3])
    cache = forward.new_cache(1, 8, "ragged", 16)
    forward.append(states, [3], cache)
    close(forward.block(torch.tensor([2]), cache, 5)[0], reference_block(config, tensors, states, 2))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_comes_back(tmp_path, own, reduced, dtype):
    """Loaded from one file or shards, saved and loaded again, the same bits under the same names; what is the target's stays."""
    target = tiny("llama")
    config = public_config(num_target_layers=2, **({"draft_vocab_size": len(KEPT)} if reduced else {}))
    tensors = public_tensors(config, dtype=dtype, own=own)
    ignored = {"t2d": torch.ones(VOCAB, dtype=torch.bool), "mask_embedding": torch.ones(WIDTH)}
    for shards in (0, 3):
        source = write(tmp_path / f"in{shards}", config, tensors | ignored, shards)
        model = DSparkModel.load(source, target)
        model.save(tmp_path / f"out{shards}")
        saved_config, saved = read(tmp_path / f"out{shards}")
        assert saved.keys() == tensors.keys()
        assert all(torch.equal(saved[n], t) and saved[n].dtype == t.dtype for n, t in tensors.items())
        again = DSparkModel.load(tmp_path / f"out{shards}", target)
        assert again.config.to_dict() == model.config.to_dict()
        assert {k: v for k, v in saved_config.items() if k in config} == {
            k: v for k, v in config.items() if k in saved_config
        } | {"dtype": str(dtype)[6:]}
        assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())
    if not own:
        assert model.target_head().data_ptr() == target.lm_head.weight.data_ptr()
        assert not any(p is q for p in model.parameters() for q in target.parameters())
        ids = torch.tensor([3, 9])
        assert torch.equal(model.embed(ids), target.model.embed_tokens(ids).to(dtype))
    if own and not reduced:
        half = DSparkModel.load(source, target, dtype=torch.float16)
        assert half.fc.weight.dtype == torch.float16 and half.confidence_head.proj.weight.dtype == dtype


def test_new_drafter_for_a_target(tmp_path):
    """Untrained, it has no bias, even confidences, and the target's own rows for a reduced vocabulary."""
    target = tiny("llama")
    config = DSparkConfig.for_target(target, mask_token_id=0, block_size=4, markov_rank=3, draft_vocab_size=len(KEPT))
    d2t = torch.tensor(KEPT) - torch.arange(len(KEPT))
    model = DSparkModel(config, target, d2t=d2t)
    assert torch.equal(model.lm_head.weight, target.lm_head.weight[KEPT]) and not model.lm_head.weight.requires_grad
    h, before = torch.randn(2, WIDTH), torch.tensor([1, 2])
    assert torch.equal(model.block_logits(h, before), model.base_logits(h))
    assert (torch.sigmoid(model.confidence_logits(h, before)) == 0.5).all()
    model.save(tmp_path)
    raw, tensors = read(tmp_path)
    assert raw["architectures"] == ["Qwen3DSparkModel"] and "embed_tokens.weight" not in tensors
    again = DSparkModel.load(tmp_path, target)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())
    # What engines read, through transformers.
    read_by = AutoConfig.from_pretrained(tmp_path)
    assert (read_by.model_type, read_by.block_size, read_by.mask_token_id, read_by.markov_rank) == ("qwen3", 4, 0, 3)
    assert (read_by.target_layer_ids, read_by.draft_vocab_size, read_by.vocab_size) == ([1], len(KEPT), VOCAB)
    assert read_by.enable_confidence_head and read_by.confidence_head_with_markov and read_by.sample_from_anchor


def test_copies_share_the_target(tmp_path):
    model, *_ = drafter_of(tmp_path, tiny("llama"), own=False)
    copied = copy.deepcopy(model)
    assert copied.target is model.target and copied.fc.weight.data_ptr() != model.fc.weight.data_ptr()
    assert torch.equal(copied.embed(torch.tensor([3])), model.embed(torch.tensor([3])))


def test_confidence_head_is_optional(tmp_path):
    """As engines do: enabled but not there, or there but not enabled, it is left out."""
    target, config = tiny("llama"), public_config()
    tensors = public_tensors(config)
    without = {n: t for n, t in tensors.items() if not n.startswith("confidence_head")}
    a = DSparkModel.load(write(tmp_path / "a", config, without), target)
    b = DSparkModel.load(write(tmp_path / "b", public_config(enable_confidence_head=False), tensors), target)
    for model in (a, b):
        assert model.confidence_head is None and not model.config.enable_confidence_head
        with pytest.raises(ValueError, match="enable_confidence_head must be true for confidences, got False"):
            model.confidence_logits(torch.zeros(1, WIDTH), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"target_layer_ids": [0, 1]}, (0, 1)),
        ({"target_layer_ids": [0], "dspark_target_layer_ids": [1]}, (1,)),
        ({"target_layer_ids": [0], "dflash_config": {"target_layer_ids": [0, 1]}}, (0, 1)),
        # The two that count what enters a layer.
        ({"target_layer_ids": [0], "eagle_aux_hidden_state_layer_ids": [1, 2]}, (0, 1)),
        ({"target_layer_ids": None, "dflash_config": {"layer_ids": [2]}}, (1,)),
    ],
)
def test_target_layers(keys, layers):
    assert DSparkConfig.from_dict(public_config(**keys)).target_layer_ids == layers


def test_keys_of_sections():
    """Drafters trained with SpecForge have them in `dflash_config` and another name for the class."""
    section = {
        "mask_token_id": 7, "target_layer_ids": [1], "markov_rank": 9, "enable_confidence_head": True,
        "confidence_head_with_markov": False, "projector_type": "dspark", "block_size": 3,
    }  # fmt: skip
    raw = {k: v for k, v in public_config().items() if k not in section} | {"dspark_noise_token_id": 8}
    config = DSparkConfig.from_dict(raw | {"architectures": ["DSparkDraftModel"], "dflash_config": section})
    assert (config.mask_token_id, config.markov_rank, config.block_size) == (7, 9, 3)
    assert config.enable_confidence_head and not config.confidence_head_with_markov
    del section["mask_token_id"]
    raw["architectures"] = ["Qwen3DSparkModel"]
    assert DSparkConfig.from_dict(raw | {"dflash_config": section}).mask_token_id == 8


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        ({}, (0, 0), (False, False)),
        ({"layer_types": ["full_attention", "sliding_attention"], **WINDOWED}, (0, 4), (False, True)),
        ({"layer_types": SLIDING, **WINDOWED, "dflash_config": {"causal": False}}, (4, 4), (False, False)),
        ({"is_causal": True, "dflash_config": {"causal": False}}, (0, 0), (True, True)),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9}}, (9, 9), (False, False)),
    ],
)
def test_windows_and_causality(keys, windows, causal):
    config = DSparkConfig.from_dict(public_config(**keys))
    assert (config.windows, config.causal) == (windows, causal)
    written = config.to_dict()
    again = DSparkConfig.from_dict(written)
    assert (again.windows, again.causal, again.to_dict()) == (windows, causal, written)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures must be \['Qwen3DSparkModel'\].*'LlamaForCausalLM'"),
        ({"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"}, "architectures must be"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type must be absent"),
        ({"markov_head_type": "gated"}, "markov_head_type must be 'vanilla', got 'gated'"),
        ({"markov_rank": 0}, "markov_rank must be an int >= 1, got 0"),
        ({"markov_rank": None}, "markov_rank must be an int >= 1, got None"),
        ({"block_size": True}, r"block_size must be an int in \[1, 128\], got True"),
        ({"mask_token_id": None}, r"mask_token_id must be an int in \[0, 63\], got None"),
        ({"mask_token_id": 64}, r"mask_token_id must be an int in \[0, 63\], got 64"),
        ({"target_layer_ids": []}, r"target_layer_ids must be a list of target layers, got \[\]"),
        ({"target_layer_ids": [-1, 1]}, "target_layer_ids must be layers >= 0"),
        ({"target_layer_ids": [1, 0]}, "target_layer_ids must be layers >= 0, each larger than the one before"),
        ({"sample_from_anchor": False}, "sample_from_anchor must be true"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias must be false"),
        ({"is_neox_style": False}, "is_neox_style must be true, got False"),
        ({"rope_theta": None}, "rope_theta must be a number > 0, got None"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section must be absent"),
        ({"layer_types": SLIDING}, "sliding_window must be an int >= 1, got None"),
        ({"logit_scale": 0}, "logit_scale must be a number > 0, got 0"),
        ({"hidden_size": "many"}, "not a Qwen3 config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of the 4 heads, got 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an int >= 1, got 0"),
    ],
)
def test_configs_that_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_dict(public_config(**keys))


def broken(path, change):
    """A checkpoint with one thing wrong."""
    config = public_config()
    tensors = public_tensors(config)
    change = change(config, tensors) or (lambda path: None)
    change(write(path, config, tensors))
    return path


def cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def sharded(change):
    def write_shards(path):
        (path / "model.safetensors").unlink()
        write(path, public_config(), public_tensors(public_config()), 2)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        change(path, index["weight_map"])
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return lambda config, tensors: write_shards


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.__delitem__("fc.weight"), "tensor 'fc.weight' is missing"),
        (lambda c, t: t.__delitem__("confidence_head.proj.bias"), "tensor 'confidence_head.proj.bias' is missing"),
        (lambda c, t: t.update({"model.fc.weight": torch.ones(2)}), "tensor 'model.fc.weight' is not known"),
        (lambda c, t: t.update({"layers.2.mlp.up_proj.weight": torch.ones(2)}), "'layers.2.mlp.up_proj.weight' is not known"),
        (lambda c, t: t.update({"norm.weight": torch.ones(31)}), r"tensor 'norm.weight' must be \[32\], got \[31\]"),
        (lambda c, t: t.update({"fc.weight": torch.ones(32, 64, dtype=torch.int8)}), r"'fc.weight' must be one of .*got int8"),
        (lambda c, t: t.update({"d2t": torch.zeros(VOCAB, dtype=torch.int64)}), "d2t must be in the checkpoint exactly where"),
        (lambda c, t: c.update({"draft_vocab_size": 40}), "d2t must be in the checkpoint exactly where"),
        (lambda c, t: cut, "model.safetensors: not a readable safetensors file"),
        (lambda c, t: lambda path: (path / "model.safetensors").unlink(), "model.safetensors: not a readable"),
        (lambda c, t: lambda path: (path / "config.json").write_text("{"), "config.json: not a readable JSON file"),
        (lambda c, t: lambda path: (path / "config.json").write_text("[]"), "config.json: must be a JSON object, got list"),
        (lambda c, t: c.update({"architectures": None}), "config.json: DSpark config: architectures must be"),
        (sharded(lambda path, where: (path / where["fc.weight"]).unlink()), "safetensors: not a readable"),
        (sharded(lambda path, where: where.pop("fc.weight")), "tensor 'fc.weight' is not in the index"),
        (sharded(lambda path, where: where.update({"fc": where["fc.weight"]})), "tensor 'fc' is in the index alone"),
        (sharded(lambda path, where: where.update({"fc.weight": "../x"})), "must name files beside it, got '../x'"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_refused(tmp_path, change, message):
    target = tiny("llama")
    before = [(p.data_ptr(), p._version, p.requires_grad) for p in target.parameters()]
    with pytest.raises(ValueError, match=message):
        DSparkModel.load(broken(tmp_path, change), target)
    assert before == [(p.data_ptr(), p._version, p.requires_grad) for p in target.parameters()]


@pytest.mark.parametrize(
    ("keys", "own", "message"),
    [
        ({"target_hidden_size": 48}, True, "target_hidden_size must be the target's 32, got 48"),
        ({"target_layer_ids": [1, 2], "num_target_layers": None}, True, "target_layer_ids must be below the target's 2 layers, got 2"),
        ({"num_target_layers": 36}, True, "num_target_layers must be the target's 2, got 36"),
        ({"vocab_size": 63, "mask_token_id": 0}, True, "vocab_size must be at least the target's 64 ids, got 63"),
        ({"vocab_size": 70}, False, "embed_tokens.weight must be in the checkpoint for a vocab_size other than the target's 64, got none for 70"),
        ({"hidden_size": 48, "target_hidden_size": 32}, False, "embed_tokens.weight must be in the checkpoint for a hidden_size other"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit(tmp_path, keys, own, message):
    config = public_config(**keys)
    with pytest.raises(ValueError, match=message):
        DSparkModel.load(write(tmp_path, config, public_tensors(config, own=own)), tiny("llama"))


def test_reduced_vocabulary_needs_its_own_head_and_table(tmp_path):
    config = public_config(draft_vocab_size=len(KEPT))
    tensors = public_tensors(config)
    for name in ("lm_head.weight", "d2t"):
        rest = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(ValueError, match=f"{name}.*(missing|in the checkpoint)"):
            DSparkModel.load(write(tmp_path, config, rest), tiny("llama"))
    with pytest.raises(ValueError, match=r"target ids in \[0, 64\), got 64 for column 0"):
        DSparkModel.load(write(tmp_path, config, tensors | {"d2t": tensors["d2t"] + 64}), tiny("llama"))
    with pytest.raises(ValueError, match=rf"d2t must be \[draft_vocab_size={len(KEPT)}\], got \[3\]"):
        DSparkModel.load(write(tmp_path, config, tensors | {"d2t": tensors["d2t"][:3]}), tiny("llama"))
