"""`markov_step`: a Markov head's bias and the draw, against torch's embedding, product and sum followed by our `sample`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import python_ref
import specdec_kernels
from specdec_kernels import SamplingTensors

from ._gate import MARGIN, _verdict
from ._inputs import TEMPERATURE, TOP_P, VOCAB
from ._timing import Settings, ms, paired, summary, table, times

NAME = "markov_step"
TORCH = "torch, then sample"


@dataclass(frozen=True)
class MarkovCase:
    """A drafter's k-th step for N requests: its rows, the tokens before them and the head, all of one dtype."""

    base: Tensor
    tokens: Tensor
    w1: Tensor
    w2: Tensor
    params: SamplingTensors
    position: Tensor
    ids: Tensor

    def __call__(self) -> specdec_kernels.MarkovOutput:
        head = (self.tokens, self.w1, self.w2)
        return specdec_kernels.markov_step(self.base, *head, self.params, self.position, ids=self.ids)

    def by_torch(self) -> specdec_kernels.SampleOutput:
        z = self.base + torch.nn.functional.embedding(self.tokens, self.w1) @ self.w2.T
        return specdec_kernels.sample(z, self.params, self.position, stream=0, ids=self.ids)


def markov_case(n: int, vocab: int, rank: int, dtype: torch.dtype) -> MarkovCase:
    """Normal rows of deviation 3 and a bias of deviation 1."""
    g = torch.Generator().manual_seed(3)
    base = torch.randn(n, vocab, generator=g).mul_(3).to(dtype)
    w1, w2 = (torch.randn(vocab, rank, generator=g).mul_(rank**-0.25).to(dtype) for _ in range(2))
    params = SamplingTensors.create(temperature=TEMPERATURE, top_p=TOP_P, seed=1, batch_size=n)
    tokens, ids = torch.randint(vocab, (n,), generator=g), torch.full((n,), 2)
    return MarkovCase(base, tokens, w1, w2, params, 100 + torch.arange(n), ids)


def check(case: MarkovCase, rows: list[int]) -> dict[str, int]:
    """The written rows within rounding of the oracle's, and the oracle's draws from those very rows."""
    out = case()
    undecided, wrong = [], []
    for n in rows:
        one = slice(n, n + 1)
        exact = python_ref.markov_logits(case.base[one], case.tokens[one], case.w1, case.w2)[0]
        digits = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[case.base.dtype]
        if not ((out.logits[n].double() - exact).abs() <= digits * exact.abs().clamp_min(1.0)).all():
            wrong.append(f"row {n} is not base + w1[token] @ w2.T")
        params = SamplingTensors.create(TEMPERATURE, TOP_P, seed=case.params.seed[one])
        want = python_ref.sample(out.logits[one], params, case.position[one], stream=0, ids=case.ids[one])
        if int(out.tokens[n]) != int(want.tokens[0]):
            if float(want.margin[0]) < MARGIN:
                undecided.append(n)
            else:
                wrong.append(f"row {n} gives {int(out.tokens[n])}, the oracle {int(want.tokens[0])}")
    return _verdict(NAME, rows, undecided, wrong)


def run(settings: Settings) -> list[dict]:
    results = []
    sizes = ((2, 4096, 32),) if settings.quick else ((1, VOCAB, 256), (8, VOCAB, 256), (1, VOCAB, 64), (8, VOCAB, 64))
    for n, vocab, rank in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            case = markov_case(n, vocab, rank, dtype)
            gate = check(case, [0, n - 1])
            rows = case().logits
            draw = lambda case=case, rows=rows: specdec_kernels.sample(rows, case.params, case.position, stream=0)  # noqa: E731
            calls = {NAME: case, TORCH: case.by_torch, "sample": draw, "sum of w2": case.w2.sum}
            measured = summary(paired(calls, settings.rounds, settings), NAME)
            results.append({
                "kind": "drafting", "batch": n, "vocab": vocab, "rank": rank, "temperature": TEMPERATURE, "top_p": TOP_P,
                "dtype": str(dtype).removeprefix("torch."), "bytes_w2": case.w2.numel() * case.w2.element_size(),
                "gate": gate, **measured,
            })  # fmt: skip
    return results


def report(results: list[dict]) -> str:
    head = results[0]
    title = f"\n{NAME} · V={head['vocab']}, T={head['temperature']:g}, top-p {head['top_p']:g}"
    lines = [
        [f"N={r['batch']}, r={r['rank']}", r["dtype"], ms(r["ms"][NAME]), ms(r["ms"][TORCH]), times(r["ratio"][TORCH]),
         ms(r["ms"]["sample"]), times(r["ratio"]["sum of w2"])]
        for r in results
    ]  # fmt: skip
    headers = ["", "dtype", "median (p25-p75)", TORCH, "/ torch", "of which sample", "/ sum of w2"]
    return f"{title}\n{table(headers, lines)}"
