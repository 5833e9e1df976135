"""Chains of drafts made for all requests alike, cut to each request's own number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import Nucleus, SamplingTensors
from ...sample import STREAM_DRAFT, STREAM_SAMPLE
from ..transfers import on_device
from .base import DraftBatch, DraftContext


def proposal_keys(context: DraftContext, offset: int) -> dict[str, Any]:
    """What `sample` and `markov_step` are given for the draft at this offset of every request: stream, position, ids."""
    if context.rule == "coupled":
        return {"stream": STREAM_SAMPLE, "position": context.position + offset}
    ids = torch.full_like(context.position, offset)
    return {"stream": STREAM_DRAFT, "position": context.position, "ids": ids}


def chain_rows(counts: list[int], longest: int, device: torch.device) -> Tensor | None:
    """Each request's own drafts among [B * longest] proposals, int64 [D]; None for all of them."""
    if all(n == longest for n in counts):
        return None
    index = [b * longest + i for b, n in enumerate(counts) for i in range(n)]
    return on_device(index, torch.int64, device)


def gather_chains(
    counts: list[int],
    rows: Tensor | None,
    tokens: list[Tensor],
    q: Tensor | None,
    nuclei: list[Nucleus],
    params: SamplingTensors,
    target_to_draft: Tensor | None,
) -> DraftBatch:
    """The drafts that `rows` (`chain_rows`) keeps; tokens, nuclei: of each offset, [B] · q: [B, n, Vd] of those offsets and perhaps
    some that were not drawn, or None where nobody reads it."""
    flat_tokens = torch.stack(tokens, 1).flatten()
    if rows is not None:
        flat_tokens = flat_tokens[rows]
    if q is None:
        return DraftBatch(flat_tokens, list(counts))
    flat = [torch.stack(parts, 1).flatten() for parts in zip(*nuclei, strict=True)]
    nucleus = Nucleus(*(f if rows is None else f[rows] for f in flat))
    q_rows = rows if q.shape[1] == len(tokens) else chain_rows(counts, q.shape[1], q.device)
    return DraftBatch(
        flat_tokens, list(counts), logits=q.view(-1, q.shape[-1]), rows=q_rows, nucleus=nucleus, params=params,
        target_to_draft=target_to_draft,
    )  # fmt: skip
