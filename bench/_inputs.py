"""Rows and drafts to measure on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import specdec_kernels
from specdec_kernels import Nucleus, SamplingTensors

B, DRAFTS, VOCAB = 8, 5, 151_936
TEMPERATURE, TOP_P = 0.8, 0.9

#: How far the draft's logits are from the target's: normal noise of this deviation on each logit.
DRAFT_NOISE = 0.5


@dataclass(frozen=True)
class Rows:
    """`target` float32 [B * (d + 1), V], `draft` float32 [B * d, V]: the target's rows plus noise, but for bonus rows."""

    label: str
    batch: int
    num_draft: int
    target: Tensor
    draft: Tensor


def _with_draft(label: str, target: Tensor, batch: int, num_draft: int, generator: torch.Generator) -> Rows:
    drafted = target.view(batch, num_draft + 1, -1)[:, :num_draft].flatten(0, 1)
    draft = torch.randn(drafted.shape, generator=generator).mul_(DRAFT_NOISE).add_(drafted)
    return Rows(label, batch, num_draft, target, draft)


@functools.lru_cache(maxsize=1)
def normal_rows(deviation: float, batch: int = B, num_draft: int = DRAFTS, vocab: int = VOCAB) -> Rows:
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(batch * (num_draft + 1), vocab, generator=generator).mul_(deviation)
    return _with_draft(f"normal, deviation {deviation:g}", target, batch, num_draft, generator)


@functools.lru_cache(maxsize=1)
def language_model_rows(batch: int = B, num_draft: int = DRAFTS, vocab: int = VOCAB, jitter: float = 0.1) -> Rows:
    """SmolLM2's logits on the demo's prompts, d + 1 consecutive positions per request, tiled to `vocab`; the tiles differ
    by normal jitter. Without the model: a synthetic stand-in, and the label says so."""
    generator = torch.Generator().manual_seed(1)
    source = _smollm2_logits(batch, num_draft + 1)
    if source is not None:
        fitted = "tiled" if vocab > source.shape[1] else "cut"
        label = f"SmolLM2 logits, {fitted} to V with jitter {jitter:g}"
    else:
        label = "synthetic stand-in for a language model (SmolLM2 not installed)"
        source = _stand_in(batch * (num_draft + 1), 49_152, generator)
    target = source.repeat(1, -(-vocab // source.shape[1]))[:, :vocab]
    target = torch.randn(target.shape, generator=generator).mul_(jitter).add_(target)
    return _with_draft(label, target, batch, num_draft, generator)


def _smollm2_logits(batch: int, positions: int) -> Tensor | None:
    try:
        import transformers

        from specdec_kernels.demo import prompts, smollm2
    except ImportError:
        return None
    if smollm2.gguf_path() is None:
        return None
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = smollm2.load()
    texts = [text for text, copies in prompts.PROMPTS.values() if copies]
    rows = []
    with torch.inference_mode():
        for i, text in enumerate(texts):
            count = len(range(i, batch, len(texts)))
            if count == 0:
                continue
            logits = model(tokenizer(text, return_tensors="pt").input_ids).logits[0].float()
            # Past the first words, where a model does not know yet what it reads.
            starts = torch.linspace(16, logits.shape[0] - positions, count).long().tolist()
            rows += [logits[start : start + positions] for start in starts[:count]]
    return torch.cat(rows)


def _stand_in(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Shaped like SmolLM2's rows: a normal bulk of deviation 3.4 and a few tokens that decay from 19 above its mean."""
    logits = torch.randn(rows, vocab, generator=generator).mul_(3.4)
    head = torch.rand(rows, vocab, generator=generator).topk(30, dim=1).indices
    return logits.scatter(1, head, torch.linspace(19, 9, 30).expand(rows, 30).contiguous())


@dataclass(frozen=True)
class ChainCase:
    """One call of `verify_chain`; also what the oracle and the peers are given."""

    variant: str
    num_draft: int
    target: Tensor
    tokens: Tensor
    cu: Tensor
    params: SamplingTensors
    position: Tensor
    draft: Tensor | None = None
    nucleus: Nucleus | None = None
    rule: str = "token"

    @property
    def batch(self) -> int:
        return self.cu.shape[0] - 1

    @property
    def rows_read(self) -> tuple[Tensor, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def num_bytes(self) -> int:
        return sum(rows.numel() * rows.element_size() for rows in self.rows_read)

    def needed_bytes(self, num_accepted: Tensor) -> int:
        """Bytes of the rows that decide the output: a chain needs nothing past the row it ends at, and where the nucleus
        of q is saved, of q no more than the row it resamples from."""
        if self.rule == "block":  # whose weights need every draft's rows
            needed = 2 * self.batch * self.num_draft + int((num_accepted == self.num_draft).sum())
            return needed * self.target.shape[1] * self.target.element_size()
        ends = (num_accepted.long() + 1).clamp_max(self.num_draft + 1)
        needed = int(ends.sum())
        if self.draft is not None:
            rejected = num_accepted < self.num_draft
            needed += int(rejected.sum() if self.nucleus is not None else ends.clamp_max(self.num_draft).sum())
        return needed * self.target.shape[1] * self.target.element_size()

    def options(self) -> dict:
        given = {"rule": self.rule, "max_draft": self.num_draft}
        if self.draft is not None:
            given |= {"draft_logits": self.draft, "draft_params": self.params, "draft_nucleus": self.nucleus}
        return given

    def __call__(self) -> specdec_kernels.VerifyOutput:
        return specdec_kernels.verify_chain(
            self.target, self.tokens, self.cu, self.params, self.position, **self.options()
        )


VARIANTS = (
    "natural acceptance",
    "all accepted (q = p)",
    "saved nucleus of q",
    "q absent, drafts = argmax",
    "block rule",
    "coupled",
    "greedy, all accepted",
    "top-p off",
)


def chain_case(rows: Rows, dtype: torch.dtype, variant: str) -> ChainCase:
    """The step of `variant` on these rows. Where there is a q, the drafts are drawn from that very q, by its stream."""
    batch, d = rows.batch, rows.num_draft
    target, draft = rows.target.to(dtype), rows.draft.to(dtype)
    if variant == "all accepted (q = p)":
        # A copy: shared memory would be read from the cache the second time.
        draft = target.view(batch, d + 1, -1)[:, :d].flatten(0, 1).clone()
    deterministic = variant in ("q absent, drafts = argmax", "greedy, all accepted")
    params = SamplingTensors.create(
        temperature=0.0 if variant == "greedy, all accepted" else TEMPERATURE,
        top_p=1.0 if variant == "top-p off" else TOP_P,
        seed=1,
        batch_size=batch,
    )
    request = torch.arange(batch).repeat_interleave(d)
    offset = torch.arange(batch * d) % d
    position = 100 + torch.arange(batch)
    if variant == "coupled":
        drawn = specdec_kernels.sample(draft, params, position[request] + offset, rows=request)
    else:
        drawn = specdec_kernels.sample(
            draft, params, position[request], rows=request, stream=0, ids=offset, return_nucleus=True
        )
    case = ChainCase(
        variant=variant,
        num_draft=d,
        target=target,
        tokens=target.argmax(-1).view(batch, d + 1)[:, :d].flatten() if deterministic else drawn.tokens,
        cu=torch.arange(batch + 1, dtype=torch.int32) * d,
        params=params,
        position=position,
        rule={"coupled": "coupled", "block rule": "block"}.get(variant, "token"),
    )
    if deterministic or variant == "coupled":
        return case
    return replace(case, draft=draft, nucleus=drawn.nucleus if variant == "saved nucleus of q" else None)


@dataclass(frozen=True)
class RowCase:
    """Rows for the one-row ops: `sample`, `nucleus`, `filter_probs`."""

    label: str
    logits: Tensor
    params: SamplingTensors
    position: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def num_bytes(self) -> int:
        return self.logits.numel() * self.logits.element_size()


def row_case(rows: Rows, dtype: torch.dtype, top_p: float = TOP_P, top_k: int = 0) -> RowCase:
    n = rows.target.shape[0]
    params = SamplingTensors.create(temperature=TEMPERATURE, top_p=top_p, top_k=top_k, seed=1, batch_size=n)
    return RowCase(rows.label, rows.target.to(dtype), params, 100 + torch.arange(n))


def shapes(quick: bool) -> dict[str, int]:
    return {"batch": 2, "num_draft": 2, "vocab": 4096} if quick else {"batch": B, "num_draft": DRAFTS, "vocab": VOCAB}


def main_rows(quick: bool):
    """Makers of the rows every op is measured on. Quick: normal rows alone, no model is loaded."""
    shape = shapes(quick)
    normal = [functools.partial(normal_rows, deviation, **shape) for deviation in (3.0, 1.0)]
    return normal[:1] if quick else [functools.partial(language_model_rows, **shape), *normal]
