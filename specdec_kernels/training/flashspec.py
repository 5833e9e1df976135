"""Training of `FlashSpecModel`: adapters and head on the target's states of the last shared layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.drafters.flashspec import FlashSpecModel
from .features import FeatureBatch
from .losses import distillation, soft_targets
from .module import PartTraining


class FlashSpecTraining(PartTraining):
    """CE(p, q) + tv (1 - sum min(p, q)): p the target's distribution over the ids that can be drafted, q the drafter's. The states
    that the adapters read when they draft are those of the text alone, so one pass trains every draft position."""

    copied = ("stack.",)

    def __init__(self, part: FlashSpecModel, *, tv: float = 1.0):
        super().__init__(part)
        self.tv = tv

    def forward(self, batch: FeatureBatch) -> dict[str, Tensor]:
        part, device = self.part, batch.tokens.device
        place = torch.arange(batch.tokens.shape[1], device=device)
        chosen = (place + 1 >= batch.starts[:, None]) & (place < batch.lengths[:, None])
        hidden = part.finish(part.stack.upper(batch.states, place.expand_as(batch.tokens)))
        return distillation(part.logits(hidden[chosen]), soft_targets(batch.last[chosen], part.head), self.tv)
