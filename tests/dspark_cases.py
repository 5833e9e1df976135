"""DSpark checkpoints made by hand in the public layout, and a block computed from them by loops in float64."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

from specdec_kernels.decoding import DSparkModel  # isort: skip

VOCAB, WIDTH = 64, 32


def kept_ids(vocab):
    """The reduced vocabulary."""
    return [i for i in range(vocab) if i % 3 != 1]


KEPT = kept_ids(VOCAB)


def public_config(**keys):
    """config.json as published drafters have it."""
    return {
        "architectures": ["Qwen3DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 5,
        "bos_token_id": 1, "confidence_head_with_markov": True, "dtype": "float32", "enable_confidence_head": True,
        "head_dim": 8, "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"], "markov_head_type": "vanilla", "markov_rank": 6, "mask_token_id": 63,
        "max_position_embeddings": 512, "model_type": "qwen3", "num_anchors": 512, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 10000, "sliding_window": None, "target_layer_ids": [0, 1], "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": VOCAB,
    } | keys  # fmt: skip


def public_tensors(config, seed=0, dtype=torch.float32, own=True):
    """Every tensor of the layout, random and large enough that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=0.3):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    columns, rank = config.get("draft_vocab_size") or config["vocab_size"], config["markov_rank"]
    taps = len(config["target_layer_ids"])
    tensors = {
        "fc.weight": normal(width, taps * WIDTH), "hidden_norm.weight": 1 + normal(width), "norm.weight": 1 + normal(width),
        "markov_head.markov_w1.weight": normal(config["vocab_size"], rank), "markov_head.markov_w2.weight": normal(columns, rank),
    }  # fmt: skip
    if config["enable_confidence_head"]:
        features = width + rank * config["confidence_head_with_markov"]
        tensors |= {"confidence_head.proj.weight": normal(1, features), "confidence_head.proj.bias": normal(1)}
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        tensors |= {f"{at}{name}.weight": 1 + normal(width) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}self_attn.{name}.weight": 1 + normal(dim) for name in ("q_norm", "k_norm")}
        shapes = {"self_attn.q_proj": (heads, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
                  "self_attn.o_proj": (width, heads), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
                  "mlp.down_proj": (width, inner)}  # fmt: skip
        for name, shape in shapes.items():
            tensors[f"{at}{name}.weight"] = normal(*shape)
            if config["attention_bias"] and "self_attn" in name:
                tensors[f"{at}{name}.bias"] = normal(shape[0])
    if own:
        tensors["embed_tokens.weight"] = normal(config["vocab_size"], width)
    reduced = columns < config["vocab_size"]
    if own or reduced:
        tensors["lm_head.weight"] = normal(columns, width, scale=0.6)
    if reduced:
        tensors["d2t"] = torch.tensor(kept_ids(config["vocab_size"])) - torch.arange(columns)
    return tensors


def write(path, config, tensors, shards=0):
    """The checkpoint as files, in one or in several with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def read(path):
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def drafter_of(path, target, seed=0, own=True, flat=1.0, **keys):
    """(model, config, tensors) of a random checkpoint written to `path` and loaded from there; flat: factor of its LM head."""
    config = public_config(**keys)
    tensors = public_tensors(config, seed, own=own)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] *= flat
    return DSparkModel.load(write(path, config, tensors), target), config, tensors


def reference_block(config, tensors, states, anchor, embed=None):
    """h [block_size, H] behind `states` [n, T * Ht] of the n tokens before the anchor, each by itself, all from scratch.

    Written from the description of the layout alone: one query, head and key at a time.
    """
    t = {name: tensor.double() for name, tensor in tensors.items()}
    embed = t["embed_tokens.weight"] if embed is None else embed.double()
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps, count, size = config["rms_norm_eps"], len(states), config["block_size"]

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def linear(x, name):
        y = x @ t[f"{name}.weight"].T
        return y + t[f"{name}.bias"] if f"{name}.bias" in t else y

    def turn(x, position):
        half = dim // 2
        angle = position / config["rope_theta"] ** (torch.arange(half, dtype=torch.float64) * 2 / dim)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    context = norm(linear(states.double(), "fc"), t["hidden_norm.weight"])
    x = embed[torch.tensor([anchor] + [config["mask_token_id"]] * (size - 1))]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        a = norm(x, t[f"{at}input_layernorm.weight"])
        source = torch.cat([context, a])
        keys = norm(linear(source, f"{at}self_attn.k_proj").view(-1, groups, dim), t[f"{at}self_attn.k_norm.weight"])
        keys = torch.stack([turn(k, p) for p, k in enumerate(keys)])
        values = linear(source, f"{at}self_attn.v_proj").view(-1, groups, dim)
        queries = norm(linear(a, f"{at}self_attn.q_proj").view(-1, heads, dim), t[f"{at}self_attn.q_norm.weight"])
        mixed = torch.zeros(size, heads, dim, dtype=torch.float64)
        for i in range(size):
            position = count + i
            seen = [j for j in range(count + size) if not (causal and j > position)]
            if sliding:
                seen = [j for j in seen if abs(j - position) < config["sliding_window"]]
            for head in range(heads):
                group = head * groups // heads
                scores = keys[seen, group] @ turn(queries[i, head], position) / math.sqrt(dim)
                mixed[i, head] = scores.softmax(0) @ values[seen, group]
        x = x + linear(mixed.flatten(1), f"{at}self_attn.o_proj")
        a = norm(x, t[f"{at}post_attention_layernorm.weight"])
        gate = linear(a, f"{at}mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(a, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    return norm(x, t["norm.weight"])


@torch.inference_mode()
def tapped(target, tokens, layers=(0, 1)):
    """[n, T * H], the outputs of the target's layers for one text, without any cache."""
    kept = {}
    hooks = [
        target.model.layers[i].register_forward_hook(
            lambda m, args, out, i=i: kept.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i in layers
    ]
    try:
        target(torch.tensor([tokens]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([kept[i][0] for i in layers], -1)


def random_states(rows, seed=0, taps=2):
    """The states of texts of the given lengths, request-major, and those of each text."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, taps * WIDTH, generator=generator) for n in rows]
    return torch.cat(parts), parts
