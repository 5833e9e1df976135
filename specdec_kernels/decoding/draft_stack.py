"""Decoder layers of a drafter: those of the target's own architecture, run over a `RowCache`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RowCache
from .masks import Masks, TreeShape, row_positions
from .packed_layers import MAX_ROWS, PackedLayers, PackedLinear, PackedNorm, unfit_layers
from .paged_cache import PagedCache
from .ragged_cache import RaggedCache
from .support import UnsupportedModel

_PACKED = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


class DraftStack(nn.Module):
    """`count` decoder layers and a norm like the target's, new ones, or the target's own for the first `shared`.

    Args:
        target: a transformers causal LM.
        count: layers in all.
        shared: of the first layers, which are the target's own modules (the same storage).
        intermediate_size: of the new layers' MLP; None: the target's.

    Raises:
        UnsupportedModel: the target's decoder is not a list of layers between an embedding and a norm.
    """

    def __init__(self, target, count: int, *, shared: int = 0, intermediate_size: int | None = None):
        super().__init__()
        decoder = target.get_decoder()
        config = copy.deepcopy(target.config.get_text_config(decoder=True))
        if not all(hasattr(decoder, name) for name in ("layers", "norm")) or "inputs_embeds" not in _parameters(
            decoder
        ):
            raise UnsupportedModel(f"drafter: {type(decoder).__name__} has no layers and norm that take embeddings")
        if shared > len(decoder.layers):
            raise ValueError(
                f"drafter: layers to share must be at most the target's {len(decoder.layers)}, got {shared}"
            )
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):
            # New layers see everything; windows of shared ones stay as they are.
            config.layer_types = [*config.layer_types[:shared], *["full_attention"] * (count - shared)]
        elif getattr(config, "sliding_window", None) and not shared:
            config.sliding_window = None
        if intermediate_size is not None:
            config.intermediate_size = intermediate_size
        config.vocab_size, config.pad_token_id = 1, None  # no embedding of its own
        config._attn_implementation = target.config._attn_implementation
        if config._attn_implementation not in ("sdpa", "eager"):
            config._attn_implementation = "sdpa"
        self.config = config
        self.decoder = type(decoder)(config).to(device=target.device)
        for parameter in self.decoder.parameters():
            # Not the buffers: rotary frequencies stay in float32, as the target's are.
            parameter.data = parameter.data.to(target.dtype)
        self.decoder.embed_tokens = nn.Identity()
        self.norm, self.decoder.norm = self.decoder.norm, nn.Identity()
        self.shared = shared
        for i in range(shared):
            self.decoder.layers[i] = decoder.layers[i]

    def start_from(self, target) -> None:
        """New layers and the norm start as copies of the target's last ones; layers of another size as if they were not there."""
        layers, new_layers = target.get_decoder().layers, self.decoder.layers[self.shared :]
        last = [layers[max(len(layers) - len(new_layers) + i, 0)] for i in range(len(new_layers))]
        with torch.no_grad():
            self.norm.weight.copy_(target.get_decoder().norm.weight)
            for new, old in zip(new_layers, last, strict=True):
                state = old.state_dict()
                if all(state[name].shape == t.shape for name, t in new.state_dict().items()):
                    new.load_state_dict(state)
                    continue
                for name, parameter in new.named_parameters():
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        parameter.zero_()

    def upper(self, x: Tensor, positions: Tensor) -> Tensor:
        """States behind the last layer, of states [B, n, H] behind the shared ones, under causal attention."""
        part = copy.copy(self.decoder)
        part._modules = dict(self.decoder._modules)
        part.layers = nn.ModuleList(self.decoder.layers[self.shared :])
        part.config = copy.copy(self.config)
        part.config.num_hidden_layers = len(part.layers)
        if getattr(self.config, "layer_types", None):
            part.config.layer_types = self.config.layer_types[self.shared :]
        return part(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state

    def forward(self, x: Tensor, mask: Tensor | dict | None, positions: Tensor, cache=None) -> Tensor:
        """States behind the last layer, before the norm; x: embeddings [B, q, H]; mask: additive 4D; cache: transformers'."""
        name = "cache" if "cache" in _parameters(self.decoder) else "past_key_values"
        return self.decoder(
            inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=cache is not None, **{name: cache}
        ).last_hidden_state


def _parameters(module: nn.Module) -> Sequence[str]:
    return list(inspect.signature(module.forward).parameters)


class StackForward:
    """Runs a `DraftStack` over a `RowCache`, packed where it is a Llama-shaped one in float32 on the CPU.

    The weights are packed once: change them and make a new one. ready: the first layers, where they are packed already.
    """

    def __init__(self, stack: DraftStack, ready: Sequence[Any] = ()):
        self.stack, self.config, self.device = stack, stack.config, next(stack.parameters()).device
        self.dtype = next(stack.parameters()).dtype
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is None:
            kinds = ["sliding_attention" if window else "full_attention"] * self.config.num_hidden_layers
        self.masks = Masks(kinds, window)
        decoder: Any = stack.decoder
        self.packed = unfit_layers(decoder, self.config, _PACKED) is None
        self.norm: Any = stack.norm
        if self.packed:
            self._layers = PackedLayers(decoder.layers, decoder.rotary_emb, self.config, ready)
            self.norm = PackedNorm(stack.norm)

    def linear(self, weight: Tensor, bias: Tensor | None = None):
        """x -> x W^T + b, packed where the layers are."""
        if self.packed:
            return PackedLinear.of(weight.detach(), None if bias is None else bias.detach())
        return lambda x: F.linear(x, weight, bias)

    def new_cache(self, batch_size: int, capacity: int, kind: str = "ragged", **options) -> RowCache:
        """As `ModelForward.new_cache`."""
        options |= {"capacity": capacity, "device": self.device}
        if kind == "paged":
            return PagedCache(self.config, batch_size, **options)
        options.pop("page_size", None)
        return RaggedCache(self.config, batch_size, **options)

    def __call__(self, x: Tensor, counts: list[int], cache: RowCache, tree: TreeShape | None = None) -> Tensor:
        """States [B * q, H] before the norm, of embeddings x [B, q, H]; the cache's lengths are left to advance."""
        batch, count = x.shape[:2]
        cache.reserve(counts, count)
        index, positions = row_positions(cache, counts, count, x.device, tree)
        mask = self.masks(cache, index, positions, self.dtype, tree)
        if self.packed and batch * count <= MAX_ROWS:
            return self._layers(x.reshape(batch * count, -1), positions, mask, cache)[0]
        return self.stack(x, mask, positions, cache).flatten(0, 1)
