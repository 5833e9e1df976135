"""Distillation of a small causal LM with the target's tokenizer, for `DraftModelDrafter` and for other engines."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from .features import FeatureBatch
from .losses import distillation, soft_targets
from .module import COPIED


def small_config(target, *, layers: int, hidden_size: int):
    """The target's config with fewer and smaller layers: heads of the same size, the MLP in the same proportion."""
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if hidden_size % dim or not dim <= hidden_size <= config.hidden_size:
        raise ValueError(
            f"train draft-model: hidden size must be a multiple of the heads' {dim} up to {config.hidden_size}, got {hidden_size}"
        )
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"train draft-model: layers must be in 1..{config.num_hidden_layers}, got {layers}")
    count = hidden_size // dim
    config.intermediate_size = config.intermediate_size * hidden_size // config.hidden_size // 8 * 8
    config.hidden_size, config.num_hidden_layers, config.head_dim = hidden_size, layers, dim
    shared = max(1, config.num_attention_heads // config.num_key_value_heads)
    config.num_attention_heads = count
    config.num_key_value_heads = count // shared if count % shared == 0 else count
    config.tie_word_embeddings = True
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    return config


class DraftModelTraining(nn.Module):
    """CE(p, q) + tv (1 - sum min(p, q)) at every trained position, p the target's distribution. The embedding, which is the LM head
    too, starts as the target's in its principal directions."""

    def __init__(self, target, *, layers: int = 2, hidden_size: int = 192, tv: float = 1.0):
        super().__init__()
        self.model = type(target)(small_config(target, layers=layers, hidden_size=hidden_size)).to(target.device)
        self._head, self.tv = (target.get_output_embeddings().weight.detach(),), tv
        with torch.no_grad():
            weight = target.get_input_embeddings().weight.detach().float()
            _, vectors = torch.linalg.eigh(weight.T @ weight)
            self.model.get_input_embeddings().weight.copy_(weight @ vectors[:, -hidden_size:])

    def rates(self) -> list[tuple[list[nn.Parameter], float]]:
        """The embedding, which starts as the target's, goes slower."""
        slow = [self.model.get_input_embeddings().weight]
        return [([p for p in self.model.parameters() if p is not slow[0]], 1.0), (slow, COPIED)]

    def state_dict(self, *args, **kwargs):
        # The LM head is the embedding: a file of both would not be accepted.
        return {
            name: t for name, t in super().state_dict(*args, **kwargs).items() if not name.endswith("lm_head.weight")
        }

    def forward(self, batch: FeatureBatch) -> dict[str, Tensor]:
        place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        chosen = (place + 1 >= batch.starts[:, None]) & (place < batch.lengths[:, None])
        mask = (place < batch.lengths[:, None]).long()
        hidden = self.model.model(batch.tokens, attention_mask=mask, use_cache=False).last_hidden_state
        p = soft_targets(batch.last[chosen], self._head[0])
        return distillation(self.model.lm_head(hidden[chosen]), p, self.tv)
