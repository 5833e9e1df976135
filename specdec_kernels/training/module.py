"""What a drafter's training has in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..decoding.drafters.part import DraftPart


class PartTraining(nn.Module):
    """A drafter's part and its loss. The state is the part's own: the target's tensors, shared or not, are not in it."""

    def __init__(self, part: DraftPart):
        super().__init__()
        self.part = part
        for parameter in part.target.parameters():
            parameter.requires_grad_(False)

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        return {name: tensor.detach() for name, tensor in self.part.tensors().items()}

    def load_state_dict(self, state, strict: bool = True, assign: bool = False):
        own = self.part.tensors()
        if set(own) != set(state):
            raise ValueError(f"checkpoint: tensors must be {sorted(own)}, got {sorted(state)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        return torch.nn.modules.module._IncompatibleKeys([], [])
