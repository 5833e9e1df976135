"""What a step costs on this machine, measured apart from the runs, and what the cost model makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from specdec_kernels.decoding.cost_model import CostModel

from ._decode_method import Method
from ._decode_methods import PLAIN

LONGEST = 8  # draft lengths that are compared


def kind_of(method: Method) -> str:
    drafter = method.decoder.drafter if method.decoder is not None else None
    if drafter is None:
        return "other"
    if drafter.block_size:
        return "blocks"
    if drafter.chooses_length or method.decoder.length is not None:
        return "own lengths"
    return "tree" if drafter.trees else "chain"


def measured_costs(methods: list[Method], ids: torch.Tensor, mask: torch.Tensor, num_draft: int, nodes: int) -> dict:
    """Seconds: `forward`, of n tokens a row, n = 1 .. max(num_draft, nodes) + 1 · `draft`, of a proposal of 1 and of num_draft
    drafts (of a tree levels), for the methods that have a prediction."""
    decoder = next(m for m in methods if m.name == PLAIN).decoder
    forward, batch, most = decoder.forward, len(ids), max(num_draft, nodes)
    cache = decoder.new_cache(batch, 256)
    feed = torch.arange(128 + most + 1).repeat(batch, 1) % forward.vocab_size
    times = defaultdict(list)
    with torch.inference_mode():
        forward(feed[:, :128], [128] * batch, cache, last_only=True)
        cache.advance([128] * batch)
        for round_ in range(8):
            for n in range(1, most + 2):
                begin = perf_counter()
                forward(feed[:, 128 : 128 + n], [n] * batch, cache)
                if round_:
                    times[n].append(perf_counter() - begin)
    draft = {}
    for method in methods:
        if kind_of(method) in ("chain", "tree"):
            draft[method.name] = {d: _proposal(method, ids, mask, d) for d in sorted({1, num_draft})}
    return {"forward": {n: median(t) for n, t in times.items()}, "draft": draft}


def _proposal(method: Method, ids: torch.Tensor, mask: torch.Tensor, num_draft: int) -> float:
    decoder = method.decoder
    before, decoder.num_draft = decoder.num_draft, num_draft
    try:
        stats = method.run(ids, mask, 0.0, 24, 0).stats
    finally:
        decoder.num_draft = before
    steps = stats.target_calls - stats.plain_steps
    return stats.draft_seconds / steps if steps else 0.0


def predictions(run: dict, costs: dict, method: str, num_draft: int, nodes: int) -> dict:
    """By the cost model, of acceptance as it was and costs measured apart: `predicted`, the speed-up over plain decoding ·
    `best_draft`, the draft length (of a tree the depth) up to `LONGEST` that would gain most, 0 for none, and `best_predicted`.
    None for methods that choose lengths by themselves or draft beside the target."""
    if run["kind"] not in ("chain", "tree") or method not in costs["draft"]:
        return {"predicted": None, "best_draft": None, "best_predicted": None}
    reached, acceptance = 1.0, []
    for rate in run["acceptance_by_position"]:
        acceptance.append(rate / reached if reached else 0.0)
        reached = rate
    forward, one = costs["forward"], costs["forward"][1]

    def verify(drafts: int) -> float:
        return forward[(nodes if run["kind"] == "tree" else drafts) + 1] / one

    model = CostModel(acceptance, verify, _line(costs["draft"][method], one))
    best = model.best(LONGEST if run["kind"] == "tree" else min(LONGEST, max(forward) - 1))
    return {
        "predicted": model.speedup(num_draft), "best_draft": best, "best_predicted": model.speedup(best) if best else 1.0
    }  # fmt: skip


def _line(seconds: dict[int, float], one: float) -> Callable[[int], float]:
    """d -> draft cost in plain steps, on the line through what was measured."""
    short, long = min(seconds), max(seconds)
    slope = (seconds[long] - seconds[short]) / (long - short) if long > short else 0.0
    return lambda d: max(seconds[short] + slope * (d - short), 0.0) / one
