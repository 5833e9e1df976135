"""A `DSparkModel` in this package's own file, which leaves out what the target has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dspark_config import DSparkConfig
from ..dspark_model import DSparkModel
from .part import DraftPart


class DSparkPart(DraftPart):
    """The trained tensors of a `DSparkModel` whose embedding and LM head are the target's, or its rows `draft_ids`: `save` with
    dtype="int8" takes a fifth of what the public layout does, which `model.save` writes.

    Args:
        target: a transformers causal LM.
        draft_ids: see `DraftPart`.
        config: the keys of a DSpark config.json; None: `DSparkConfig.for_target(target, **keys)`.
    """

    kind = "dspark"

    def __init__(self, target, *, draft_ids=None, config: dict[str, Any] | None = None, **keys):
        size = None if draft_ids is None else len(draft_ids)
        made = (
            DSparkConfig.for_target(target, draft_vocab_size=size, **keys)
            if config is None
            else DSparkConfig.from_dict(config)
        )
        super().__init__(target, draft_ids=draft_ids, config=made.to_dict())
        d2t = (
            None if self.draft_ids is None else self.draft_ids - torch.arange(len(self.draft_ids), device=target.device)
        )
        self.model = DSparkModel(made, target, d2t=d2t).to(device=target.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.model.config.target_layer_ids)

    def tensors(self) -> dict[str, Tensor]:
        left_out = ("model.lm_head.", "model.embed_tokens.", "model.d2t")
        return {name: t for name, t in super().tensors().items() if not name.startswith(left_out)}
