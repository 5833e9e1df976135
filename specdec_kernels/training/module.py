"""What a drafter's training has in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..decoding.drafters.part import DraftPart

COPIED = 0.5


class PartTraining(nn.Module):
    """A drafter's part and its loss. `copied`: prefixes of the parameters that start as copies of the target's. The state is the part's own: the target's tensors, shared or not, are not in it."""

    copied: tuple[str, ...] = ()

    def __init__(self, part: DraftPart):
        super().__init__()
        self.part = part
        for parameter in part.target.parameters():
            parameter.requires_grad_(False)

    def rates(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters and the factor of their learning rate: those that start as copies of the target's go slower."""
        own = {id(t) for t in self.part.tensors().values()}
        groups: dict[float, list[nn.Parameter]] = {1.0: [], COPIED: []}
        for name, parameter in self.part.named_parameters():
            if parameter.requires_grad and id(parameter) in own:
                groups[COPIED if name.startswith(self.copied) else 1.0].append(parameter)
        return [(parameters, factor) for factor, parameters in groups.items() if parameters]

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
