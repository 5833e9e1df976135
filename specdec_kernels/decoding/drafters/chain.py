"""Chains of drafts sampled one after the other."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ... import Nucleus, SamplingTensors, sample
from .base import DraftBatch, DraftContext, Drafter
from .chains import chain_rows, gather_chains, proposal_keys


class ChainDrafter(Drafter):
    """Samples each draft from a model that has read the text and the drafts before it, with the request's own parameters.

    Subclasses say what the model is: `_start` and `_next` give its logits. `_begin_chains` is to be called by their `begin`.
    """

    #: int [V], column of each target id in the logits or -1; None: ids are the same.
    target_to_draft: Tensor | None = None
    _greedy = False

    def _begin_chains(self, params: SamplingTensors) -> None:
        self._greedy = bool(params.greedy.all())

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
        rows = chain_rows(context.budgets, longest, device)
        logits = self._start(context)
        tokens: list[Tensor] = []
        nuclei: list[Nucleus] = []
        q = logits.new_empty(batch, longest, logits.shape[1]) if keep_q else None
        for offset in range(longest):
            drawn = sample(
                logits,
                params,
                **proposal_keys(context, offset),
                target_to_draft=self.target_to_draft,
                return_nucleus=keep_q,
            )
            tokens.append(drawn.tokens)
            if q is not None and drawn.nucleus is not None:
                q[:, offset] = logits
                nuclei.append(drawn.nucleus)
            if offset + 1 < longest:
                logits = self._next(drawn.tokens.to(torch.int64))
        return gather_chains(context.budgets, rows, tokens, q, nuclei, params, self.target_to_draft)
