"""Training of `EagleModel`: the drafter's own steps unrolled, each against the target's distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from ..decoding.drafters.eagle import EagleModel
from .features import FeatureBatch
from .losses import log_softmax, overlap, soft_targets
from .module import PartTraining


class EagleTraining(PartTraining):
    """sum over the steps s of decay^s CE(p, q_s): q_0 from the target's features, q_s from the drafter's own of s steps before
    (training-time test, EAGLE-3), p the target's distribution over the ids that can be drafted."""

    def __init__(self, part: EagleModel, *, steps: int = 3, decay: float = 0.8):
        super().__init__(part)
        self.steps, self.decay = steps, decay

    def forward(self, batch: FeatureBatch) -> dict[str, Tensor]:
        part, device = self.part, batch.tokens.device
        B, n = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        entry = torch.arange(n, device=device)
        # Entry i reads token i + 1 and predicts token i + 2, whose distribution the target's state of token i + 1 gives.
        wanted = (entry + 2 >= batch.starts[:, None]) & (entry + 1 < batch.lengths[:, None])
        embeddings = part.embed(batch.tokens[:, 1:])
        features = part.fuse(batch.states[:, :-1])
        positions = entry.expand(B, n)
        back = entry[:, None] - entry  # of a query (row) to a key's entry (column)
        target = soft_targets(batch.last[:, 1:][wanted], part.head)
        cache, out, total = DynamicCache(), {}, features.sum() * 0.0
        for step in range(self.steps):
            # Of the first step's keys a query sees those that the target has given, of each later one the entry on its path.
            seen = torch.cat([back >= step, *(back == step - j for j in range(1, step + 1))], 1)
            mask = torch.zeros(seen.shape, device=device, dtype=features.dtype).masked_fill_(
                ~seen, torch.finfo(features.dtype).min
            )
            states = part.stack(part.join(embeddings, features), mask.expand(B, 1, -1, -1), positions, cache)
            chosen = wanted & (entry >= step)
            if not bool(chosen.any()):  # texts shorter than the unrolled steps
                break
            p = target if step == 0 else target[chosen[wanted]]
            log_q = log_softmax(part.logits(part.stack.norm(states)[chosen]))
            total = total - self.decay**step * (p * log_q).sum(-1).mean()
            with torch.no_grad():
                out[f"overlap_{step + 1}"] = overlap(p, log_q.exp()).mean()
                out[f"hit_{step + 1}"] = (log_q.argmax(-1) == p.argmax(-1)).float().mean()
            features = F.pad(states, (0, 0, 1, 0))[:, :-1]
        return {"loss": total, **out}
