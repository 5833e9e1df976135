"""`python -m specdec_kernels.demo`: plain and speculative decoding of a real model, side by side."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from time import perf_counter

import torch

from .. import info
from ..decoding import Drafter, DraftModelDrafter
from . import compare, drafters, rules, smollm2
from .prompts import PROMPTS

_SAMPLED = compare.Mode(0.8, 0.9)
_SEED = 1234
_SHOWN = ("lookup", "lookup tree", "eagle tree", "flashspec", "dspark")


def _arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m specdec_kernels.demo", description=__doc__)
    parser.add_argument("--target", help=f"hub id or path of a causal LM (default: {smollm2.NAME})")
    parser.add_argument(
        "--draft",
        help="hub id or path of a smaller model with the same tokenizer (default: lookups, and the trained drafters of --parts)",
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="compare the rules of verify_chain instead, with sampled drafts (some ten minutes)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="with --rules and without --draft: the target's first layers that draft (default: all but 2)",
    )
    parser.add_argument(
        "--parts",
        type=Path,
        help="folder of trained drafters for the target (default: the package's, without --target)",
    )
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per run")
    parser.add_argument("--num-draft", type=int, default=5, help="most drafts per step")
    parser.add_argument("--prompt", help="measure this message instead of the demo's three")
    parser.add_argument("--rounds", type=int, default=3, help="most paired rounds of every cell")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="time to measure for, shared by the cells; each gets at least one round",
    )
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(argv)
    if options.layers is not None and (not options.rules or options.draft):
        parser.error("--layers goes with --rules and without --draft")
    return options


def _load(name: str | None):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name is None:
        return smollm2.load()
    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def _encode(tokenizer, message: str) -> torch.Tensor:
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": message}]
        message = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(message, return_tensors="pt").input_ids


def _compare_rules(options, model, prompts: dict[str, torch.Tensor]) -> None:
    if options.draft:
        draft, method = _load(options.draft)[0], options.draft
    else:
        count = max(1, model.config.num_hidden_layers - 2) if options.layers is None else options.layers
        draft = rules.first_layers(model, count)
        method = f"the target's first {count} of {model.config.num_hidden_layers} layers, untrained: for acceptance, not speed"
    comparison = rules.RuleComparison(model, DraftModelDrafter(draft), options.num_draft)
    comparison.warmup(next(iter(prompts.values())))
    print(f"drafts    {options.num_draft} per step by {method}\n", flush=True)
    modes = (compare.Mode(), _SAMPLED, compare.Mode(1.0))
    cells = {(key, mode): {} for key in prompts for mode in modes}
    begin = perf_counter()
    for index, ((key, mode), into) in enumerate(cells.items()):
        deadline, done = begin + options.seconds * (index + 1) / len(cells), 0
        while done < options.rounds and (done == 0 or perf_counter() < deadline):
            comparison.round(prompts[key], mode, options.tokens, _SEED + done, into)
            done += 1
        print(f"{key}, {mode.label} ({done} paired round{'s' if done > 1 else ''})")
        print(rules.rule_table(into), "\n", flush=True)
    for mode in modes:
        total: dict[str, compare.Measurement] = {}
        for key in prompts:
            for name, cell in cells[key, mode].items():
                total.setdefault(name, compare.Measurement()).extend(cell)
        print(f"all prompts, {mode.label}")
        print(rules.rule_table(total), "\n", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps(
                [
                    {"prompt": key, "mode": mode.label, "rules": {n: m.to_dict() for n, m in into.items()}}
                    for (key, mode), into in cells.items()
                ],
                indent=1,
            )
        )


def main(argv=None) -> None:
    options = _arguments(argv)
    import transformers

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)

    begin = perf_counter()
    model, tokenizer = _load(options.target)
    name = options.target or smollm2.NAME
    given = {"given prompt": (options.prompt, True)} if options.prompt else PROMPTS
    prompts = {key: _encode(tokenizer, message) for key, (message, _) in given.items()}
    if options.rules:
        print(f"model     {name}, {model.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
        _compare_rules(options, model, prompts)
        return
    ours: dict[str, Drafter]
    if options.draft:
        draft_model, _ = _load(options.draft)
        ours, peer = {"draft model": DraftModelDrafter(draft_model)}, {"assistant_model": draft_model}
    else:
        parts = options.parts or (None if options.target is None else Path())
        ours = {name: make() for name, make in drafters.available(model, parts).items() if name in _SHOWN}
        peer = {"prompt_lookup_num_tokens": options.num_draft}
    comparison = compare.Comparison(model, ours, peer, options.num_draft)
    comparison.warmup(next(iter(prompts.values())))
    native = info()["backends"]["native (CPU)"]
    print(f"model     {name}, {model.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"drafts    up to {options.num_draft} in a row per step; generate, assisted: {', '.join(peer)}")
    for name, decoder in comparison.ours.items():
        print(f"          {name}: rule {decoder.rule!r}")
    print(
        f"kernels   {'native, ' + str(native['isa']) if native['available'] else 'plain torch: ' + str(native['reason'])}"
    )
    print(
        f"forward   ours: {type(comparison.plain.forward).__name__}; generate: transformers {transformers.__version__} as is"
    )
    print(f"ready after {perf_counter() - begin:.1f} s\n", flush=True)

    cells: dict[tuple[str, compare.Mode], dict[str, compare.Measurement]]
    cells = {(key, mode): {} for key in prompts for mode in (compare.Mode(), _SAMPLED)}
    begin = perf_counter()
    for index, ((key, mode), into) in enumerate(cells.items()):
        deadline, done = begin + options.seconds * (index + 1) / len(cells), 0
        while done < options.rounds and (done == 0 or perf_counter() < deadline):
            comparison.round(prompts[key], mode, options.tokens, _SEED + done, into)
            done += 1
        print(f"{key}, {mode.label} ({'one paired round' if done == 1 else f'median of {done} paired rounds'})")
        print(compare.table(compare.rows(into)), "\n", flush=True)
    print(
        "speed-up: tokens per second over plain `generate` in the same round, prefill included. accepted: of the drafts that were\n"
        "verified, all nodes of a tree counted. verify: share of the steps' time outside the model (lookup, verification, sampling, bookkeeping). calls include the prefill.\n"
    )

    key = next(iter(prompts))
    print(f"{key}, streamed:\n")
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = comparison.ours[comparison.first].generate(
        prompts[key], params=compare.Mode().tensors(_SEED), max_new_tokens=options.tokens, streamer=streamer
    )
    print(f"\n{result.stats.table()}\n")

    print(f"same seed with and without speculation ({_SAMPLED.label}, rule 'coupled'):")
    for key, prompt in prompts.items():
        verdict = comparison.same_seed(prompt, _SAMPLED, options.tokens, _SEED, cells[key, _SAMPLED])
        print(f"  {key}: {verdict}")
    if options.json:
        report = {
            "model": name, "threads": torch.get_num_threads(), "environment": info(),
            "cells": [
                {"prompt": key, "mode": mode.label, "methods": {n: m.to_dict() for n, m in into.items()}}
                for (key, mode), into in cells.items()
            ],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
