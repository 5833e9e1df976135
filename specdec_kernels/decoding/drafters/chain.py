"""Chains of drafts sampled one after the other."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ... import Nucleus, SamplingTensors, sample
from ...eager._rows import GREEDY_BELOW
from ...sample import STREAM_DRAFT, STREAM_SAMPLE
from ..transfers import on_device
from .base import DraftBatch, DraftContext, Drafter


class ChainDrafter(Drafter):
    """Samples each draft from a model that has read the text and the drafts before it, with the request's own parameters.

    Subclasses say what the model is: `_start` and `_next` give its logits. `_begin_chains` is to be called by their `begin`.
    """

    #: int [V], column of each target id in the logits or -1; None: ids are the same.
    target_to_draft: Tensor | None = None
    _greedy = False

    def _begin_chains(self, params: SamplingTensors) -> None:
        self._greedy = not bool((params.temperature >= GREEDY_BELOW).any())

    @abstractmethod
    def _start(self, context: DraftContext) -> Tensor:
        """Logits [B, Vd] of the token behind each text."""

    @abstractmethod
    def _next(self, tokens: Tensor) -> Tensor:
        """Logits [B, Vd] behind these drafts, int64 [B], which follow the last ones."""

    def propose(self, context: DraftContext) -> DraftBatch | None:
        longest = max(context.budgets, default=0)
        if longest == 0:
            return None
        batch, device = len(context.budgets), context.position.device
        params = context.params
        # Rule "coupled" and greedy requests never read q.
        keep_q = context.rule != "coupled" and not self._greedy
        rows = self._rows(context.budgets, longest, device)
        logits = self._start(context)
        tokens, nuclei = [], []
        q = logits.new_empty(batch, longest, logits.shape[1]) if keep_q else None
        place: dict[str, Any]
        for offset in range(longest):
            if context.rule == "coupled":
                place = {"stream": STREAM_SAMPLE, "position": context.position + offset}
            else:
                ids = torch.full((batch,), offset, dtype=torch.int64, device=device)
                place = {"stream": STREAM_DRAFT, "position": context.position, "ids": ids}
            drawn = sample(logits, params, **place, target_to_draft=self.target_to_draft, return_nucleus=keep_q)
            tokens.append(drawn.tokens)
            if q is not None:
                q[:, offset] = logits
                nuclei.append(drawn.nucleus)
            if offset + 1 < longest:
                logits = self._next(drawn.tokens.to(torch.int64))
        return self._gather(context.budgets, rows, tokens, q, nuclei, params)

    @staticmethod
    def _rows(counts: list[int], longest: int, device: torch.device) -> Tensor | None:
        """Each request's own drafts among [B * longest] proposals, int64 [D]; None for all of them."""
        if all(n == longest for n in counts):
            return None
        index = [b * longest + i for b, n in enumerate(counts) for i in range(n)]
        return on_device(index, torch.int64, device)

    def _gather(self, counts, rows, tokens, q, nuclei, params) -> DraftBatch:
        """Cuts [B, longest] proposals to each request's own number and flattens them."""
        tokens = torch.stack(tokens, 1).flatten()
        if rows is not None:
            tokens = tokens[rows]
        nucleus = None
        if q is not None:
            flat = [torch.stack(parts, 1).flatten() for parts in zip(*nuclei, strict=True)]
            nucleus = Nucleus(*(f if rows is None else f[rows] for f in flat))
            q = q.view(-1, q.shape[-1])
        return DraftBatch(
            tokens, list(counts), logits=q, rows=rows if q is not None else None, nucleus=nucleus,
            params=params if q is not None else None, target_to_draft=self.target_to_draft if q is not None else None,
        )  # fmt: skip
