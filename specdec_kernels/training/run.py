"""Trains one drafter from texts to file."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import nn

from ..decoding import (
    DraftModelDrafter,
    DSparkDrafter,
    DSparkPart,
    EagleDrafter,
    EagleModel,
    FlashSpecDrafter,
    FlashSpecModel,
    load_drafter_part,
)
from . import features, held_out
from .cli import frequent_ids
from .draft_model import DraftModelTraining
from .dspark import DSparkTraining
from .dspark_start import start_attention
from .eagle import EagleTraining
from .flashspec import FlashSpecTraining
from .texts import Text
from .trainer import train

#: Options that a run's checkpoints depend on.
_SHAPING = {
    "kind", "target", "seed", "epochs", "learning_rate", "tokens_per_step", "held_out", "whole", "draft_vocab",
    "intermediate_size", "taps", "steps", "shared", "adapters", "layers", "hidden_size", "block_size", "markov_rank",
    "mask_token", "bf16", "heads", "kv_heads", "blocks",
}  # fmt: skip

_DRAFTERS: dict[str, Any] = {
    "eagle": EagleDrafter,
    "dspark": DSparkDrafter,
    # Blocks bound the tokens of a call by their size, whatever the drafter knows.
    "flashspec": lambda part: FlashSpecDrafter(part, block_size=None),
}


def build(options, target, draft_ids: list[int] | None) -> tuple[nn.Module, tuple[int, ...]]:
    """The module to train and the taps that it reads."""
    torch.manual_seed(options.seed)
    if options.kind == "draft-model":
        return DraftModelTraining(target, layers=options.layers, hidden_size=options.hidden_size), ()
    common: dict[str, Any] = {"draft_ids": draft_ids, "intermediate_size": options.intermediate_size}
    if options.kind == "eagle":
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        taps = options.taps or [layers // 4, layers // 2, layers - 1 - layers // 4]
        part = EagleModel(target, taps=taps, **common)
        return EagleTraining(part, steps=options.steps), part.taps
    if options.kind == "dspark":
        mask = len(target.get_input_embeddings().weight) - 1 if options.mask_token is None else options.mask_token
        keys: dict[str, Any] = {
            "mask_token_id": mask, "num_layers": options.layers, "block_size": options.block_size,
            "markov_rank": options.markov_rank, "target_layer_ids": options.taps,
        } | _heads(options, target)  # fmt: skip
        if options.intermediate_size is not None:
            keys["intermediate_size"] = options.intermediate_size
        dspark = DSparkPart(target, draft_ids=draft_ids, **keys)
        return DSparkTraining(dspark, blocks=options.blocks), dspark.taps
    part = FlashSpecModel(target, shared=options.shared, adapters=options.adapters, **common)
    return FlashSpecTraining(part), part.taps


def _heads(options, target) -> dict[str, int]:
    """A drafter of one layer reads a token's state through its values: with fewer key heads than heads they are narrower than it."""
    heads = options.heads or target.config.get_text_config(decoder=True).num_attention_heads
    return {"num_attention_heads": heads, "num_key_value_heads": options.kv_heads or heads}


def train_drafter(options, target, tokenizer, texts: list[Text], command: str) -> dict:
    """Trains what the command line asks for and writes it to `options.out`; figures of the texts that were held out."""
    out: Path = options.out
    if getattr(options, "public", None) is not None and options.public.resolve() == out.resolve():
        raise ValueError(f"train: --public must be another folder than --out, got {out} for both")
    out.mkdir(parents=True, exist_ok=True)
    vocab = target.get_output_embeddings().weight.shape[0]
    trained, held = held_out.split(texts, options.held_out)
    # Parts are trained in float32, whatever the target runs in; its states are its own.
    exact = target if target.dtype == torch.float32 else copy.deepcopy(target).float()
    model, taps = build(options, exact, frequent_ids([texts[i] for i in trained], options.draft_vocab, vocab))
    folder = features.compute(target, texts, taps, options.features or out / "features")
    common: dict[str, Any] = {"hidden_size": target.config.get_text_config(decoder=True).hidden_size}
    batches = features.FeatureBatches(
        folder,
        taps,
        tokens=options.tokens_per_step,
        texts=trained,
        seed=options.seed,
        whole=options.whole,
        **common,
    )
    _same_run(
        out, {name: str(value) for name, value in sorted(vars(options).items()) if name in _SHAPING}, _digest(texts)
    )
    if options.kind == "dspark":
        start_attention(model.part.model, batches)
    begin = perf_counter()
    train(
        model, batches, out, epochs=options.epochs, learning_rate=options.learning_rate, seed=options.seed,
        save_steps=options.save_steps, bf16=options.bf16,
    )  # fmt: skip
    seconds = perf_counter() - begin
    report = evaluate(model, features.FeatureBatches(folder, taps, texts=held, **common))
    about = {
        "command": command, "seed": options.seed, "texts": len(texts), "trained": len(trained), "held_out": len(held),
        "tokens": sum(len(t.tokens) - t.start for t in texts), "texts_sha256": _digest(texts), "figures": report,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    kept = [texts[i] for i in held]
    if options.kind == "draft-model":
        model.model.save_pretrained(out)
        report |= held_out.decode(target, DraftModelDrafter(model.model), kept)
        (out / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    else:
        # Decoded is what the file holds, rounded as it is; then its figures are written beside it.
        model.part.save(out, dtype=options.dtype, about=about, tokenizer=tokenizer)
        report |= held_out.decode(target, _DRAFTERS[options.kind](load_drafter_part(out, target)), kept)
        model.part.save(out, dtype=options.dtype, about=about, tokenizer=tokenizer)
        if options.kind == "dspark" and options.public:
            model.part.model.save(options.public)
    return report | {"seconds": round(seconds, 1), "bytes": (out / "model.safetensors").stat().st_size}


def _same_run(out: Path, options: dict[str, str], digest: str) -> None:
    """Notes what is being trained; ValueError where the folder has the checkpoints of something else."""
    path, now = out / "run.json", options | {"texts": digest}
    if path.exists() and any((out / "checkpoints").glob("checkpoint-*")):
        kept = json.loads(path.read_text())
        for name in sorted(set(kept) | set(now)):
            if kept.get(name) != now.get(name):
                raise ValueError(
                    f"{out}: has checkpoints of another run: {name} was {kept.get(name)}, is {now.get(name)}; name another folder or "
                    "remove its checkpoints"
                )
    path.write_text(json.dumps(now, indent=1) + "\n")


@torch.inference_mode()
def evaluate(model: nn.Module, batches: features.FeatureBatches) -> dict[str, float]:
    """What the training logs, over all batches: means by their numbers of trained tokens."""
    total: dict[str, float] = {}
    tokens = 0
    for i in range(len(batches)):
        batch = batches[i]
        count = int((batch.lengths - batch.starts).sum())
        tokens += count
        for name, value in model(batch).items():
            total[name] = total.get(name, 0.0) + float(value) * count
    return {name: round(value / tokens, 4) for name, value in total.items()}


def _digest(texts: list[Text]) -> str:
    return hashlib.sha256(json.dumps([t.tokens for t in texts]).encode()).hexdigest()
