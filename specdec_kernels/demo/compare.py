"""Paired measurements of one prompt: transformers' generate, with and without its own speculation, against ours with each drafter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from .. import SamplingTensors
from ..decoding import Drafter, GenerateResult, SpecDecodeStats, SpeculativeDecoder

BASELINE = "generate"
PEER = "generate, assisted"
PLAIN = "ours, plain"


@dataclass(frozen=True)
class Mode:
    """Sampling parameters of a measurement; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def label(self) -> str:
        return f"T {self.temperature:g}, top-p {self.top_p:g}" if self.temperature else "greedy"

    def transformers(self) -> dict:
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}

    def tensors(self, seed: int) -> SamplingTensors:
        return SamplingTensors.create(temperature=self.temperature, top_p=self.top_p, seed=seed, batch_size=1)


@dataclass
class Measurement:
    """Runs of one method on one prompt and mode, one entry per round."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    stats: list[SpecDecodeStats] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)  # ours only

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round, prefill included."""
        return [n / s for n, s in zip(self.tokens, self.seconds, strict=True)]

    def extend(self, other: Measurement) -> None:
        for f in fields(self):
            getattr(self, f.name).extend(getattr(other, f.name))

    def to_dict(self) -> dict:
        return {
            "tokens": self.tokens, "seconds": self.seconds, "target_calls": self.calls,
            "stats": [s.to_dict() for s in self.stats],
        }  # fmt: skip


@contextlib.contextmanager
def calls_of(model) -> Iterator[list[None]]:
    """A list with an element for each forward of the model meanwhile."""
    calls: list[None] = []
    # A hook that stayed would keep the packed forward from being used.
    hook = model.register_forward_pre_hook(lambda _module, _args: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


class Comparison:
    """Runs transformers' two methods, our decoder without drafts, and with each drafter.

    Args:
        model: the target, unchanged: both `generate` methods run it as transformers ships it.
        drafters: ours by name.
        peer: keyword arguments that switch on transformers' own speculation.
        num_draft, max_nodes: drafts per step; the first is also the peer's.
    """

    def __init__(self, model, drafters: dict[str, Drafter], peer: dict, num_draft: int = 5, max_nodes: int = 12):
        self.model, self.peer = model, peer
        self.plain = SpeculativeDecoder(model, None)
        # One packed copy of the weights serves all.
        forward = self.plain.forward
        options = {"num_draft": num_draft, "max_nodes": max_nodes, "forward": forward}
        self.ours = {name: SpeculativeDecoder(model, drafter, **options) for name, drafter in drafters.items()}
        self.first = next(iter(drafters))
        self.coupled = SpeculativeDecoder(model, drafters[self.first], rule="coupled", **options)
        self._runs: dict[str, Callable[[Tensor, Mode, int, int], tuple[int, int, GenerateResult | None]]] = {
            BASELINE: self._generate,
            PEER: lambda *a: self._generate(*a, **self.peer),
            PLAIN: lambda *a: self._decode(self.plain, *a),
        }
        for name, decoder in self.ours.items():
            self._runs[name] = lambda *a, decoder=decoder: self._decode(decoder, *a)
        self.methods = tuple(self._runs)

    def warmup(self, prompt: Tensor) -> None:
        """First calls of everything, and the measured step costs."""
        self.plain.warmup()
        for decoder in self.ours.values():
            decoder.warmup()
        for run in self._runs.values():
            run(prompt, Mode(), 4, 0)

    def round(self, prompt: Tensor, mode: Mode, tokens: int, seed: int, into: dict[str, Measurement]) -> None:
        """One run of every method, back to back, so that the machine's other load meets them alike."""
        for name in self.methods:
            begin = perf_counter()
            count, calls, result = self._runs[name](prompt, mode, tokens, seed)
            seconds = perf_counter() - begin
            cell = into.setdefault(name, Measurement())
            cell.tokens.append(count)
            cell.seconds.append(seconds)
            cell.calls.append(calls)
            if result:
                cell.stats.append(result.stats)
                cell.texts.append(result.tokens[0])

    def _generate(self, prompt, mode, tokens, seed, **kwargs):
        torch.manual_seed(seed)
        with calls_of(self.model) as calls:
            output = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **mode.transformers(), **kwargs
            )
        return output.shape[1] - prompt.shape[1], len(calls), None

    def _decode(self, decoder, prompt, mode, tokens, seed):
        result = decoder.generate(prompt, params=mode.tensors(seed), max_new_tokens=tokens)
        # As transformers' count, with the prefill, whose logits give a token as well.
        return result.lengths[0], result.stats.target_calls + 1, result

    def same_seed(self, prompt: Tensor, mode: Mode, tokens: int, seed: int, cells: dict[str, Measurement]) -> str:
        """Whether a seed gives the same text with and without speculation under rule "coupled", as a sentence.

        `cells`: measured rounds whose first had that seed; they answer where our decoder runs that rule anyway.
        """
        plain, (drafted, stats) = cells[PLAIN].texts[0], (cells[self.first].texts[0], cells[self.first].stats[0])
        if self.ours[self.first].rule != self.coupled.rule:
            result = self._decode(self.coupled, prompt, mode, tokens, seed)[2]
            drafted, stats = result.tokens[0], result.stats
        if not stats.accepted:
            return f"{len(plain)} tokens, none of them drafted: nothing is shown"
        return f"{len(plain)} tokens, {stats.accepted} of them drafted: {verdict(plain, drafted)}"


def verdict(a: list[int], b: list[int]) -> str:
    """Whether two texts are the same, or where they part."""
    if a == b:
        return "identical"
    part = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"part at token {part}"


def speedups(cells: dict[str, Measurement], method: str) -> list[float]:
    """Tokens per second of `method` over those of plain `generate` in the same round."""
    return [a / b for a, b in zip(cells[method].rates, cells[BASELINE].rates, strict=True)]


def rows(cells: dict[str, Measurement]) -> list[list[str]]:
    """Table rows of one prompt and mode, medians over the rounds."""
    out = []
    for name, cell in cells.items():
        calls = median(cell.calls)
        row = [
            name,
            f"{median(cell.tokens):.0f}",
            f"{median(cell.seconds):.2f}",
            f"{median(cell.rates):.1f}",
            f"{calls:.0f}",
        ]
        if cell.stats and name != PLAIN:
            row += [f"{median(s.acceptance_rate for s in cell.stats):.2f}"]
        else:
            row += [""]
        row += [f"{median(n / c for n, c in zip(cell.tokens, cell.calls, strict=True)):.2f}"]
        row += [f"{median(speedups(cells, name)):.2f}x"]
        row += [f"{100 * median(s.overhead_share for s in cell.stats):.1f}%" if cell.stats else ""]
        out.append(row)
    return out


HEADER = ["method", "tokens", "seconds", "tok/s", "calls", "accepted", "tok/call", "speed-up", "verify"]


def table(body: list[list[str]], header: list[str] = HEADER) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])
