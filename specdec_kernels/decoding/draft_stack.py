"""Decoder layers of a drafter: those of the target's own architecture, run over a `RowCache`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RowCache
from .caches import new_cache
from .masks import Masks, TreeShape, row_positions
from .packed_layers import MAX_ROWS, PackedLayers, PackedLinear, PackedNorm, drafting_dtype, unfit_layers
from .support import UnsupportedModel
from .weight_stamp import WeightStamp

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
        if intermediate_size is not None and intermediate_size < 1:
            raise ValueError(f"drafter: intermediate_size must be >= 1 or None, got {intermediate_size}")
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
        """New layers start as copies of the target's, behind shared ones of those that follow there, else of its last ones, and
        the norm as a copy of its norm; layers of another size start as if they were not there."""
        layers, new_layers = target.get_decoder().layers, self.decoder.layers[self.shared :]
        first = self.shared or max(len(layers) - len(new_layers), 0)
        given = [layers[min(first + i, len(layers) - 1)] for i in range(len(new_layers))]
        with torch.no_grad():
            self.norm.weight.copy_(target.get_decoder().norm.weight)
            for new, old in zip(new_layers, given, strict=True):
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

    `refresh` (once per `generate`, before the first forward) packs the weights, and again what has changed since; weights must
    not change in between.

    Args:
        stack: the layers.
        ready: gives the first layers packed already, as many as there are.
        matmul_dtype: of the packed matrices; None: `drafting_dtype`.
    """

    def __init__(
        self, stack: DraftStack, ready: Callable[[], Sequence[Any]] = tuple, matmul_dtype: torch.dtype | None = None
    ):
        self.matmul_dtype = drafting_dtype(matmul_dtype)
        self.stack, self.config, self.device = stack, stack.config, next(stack.parameters()).device
        self.dtype = next(stack.parameters()).dtype
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is None:
            kinds = ["sliding_attention" if window else "full_attention"] * self.config.num_hidden_layers
        self.masks = Masks(kinds, window)
        self.norm: Any = stack.norm
        self._ready, self._linears = ready, list[_Linear]()
        self._layers: PackedLayers | None = None
        self._stamp: WeightStamp | None = None
        self._packed_layers: list[Any] = []

    def linear(self, weight: Callable[[], Tensor]) -> _Linear:
        """x -> x W^T, packed where the layers are; weight: gives W."""
        self._linears.append(_Linear(weight))
        return self._linears[-1]

    def refresh(self) -> None:
        """Takes in the weights as they are."""
        decoder: Any = self.stack.decoder
        if unfit_layers(decoder, self.config, _PACKED) is not None:
            self._layers, self._stamp, self.norm = None, None, self.stack.norm
            for linear in self._linears:
                linear.packed = None
            return
        weights = [linear.weight() for linear in self._linears]
        stamp, ready = WeightStamp([*self.stack.parameters(), *weights]), list(self._ready())
        if self._layers is not None and self._stamp == stamp and _same(self._packed_layers, ready):
            return
        with torch.inference_mode(False), torch.no_grad():
            self._layers = PackedLayers(decoder.layers, decoder.rotary_emb, self.config, ready, self.matmul_dtype)
            self.norm = PackedNorm(self.stack.norm)
            for linear, weight in zip(self._linears, weights, strict=True):
                linear.packed = None  # frees the old copy before the new one is made
                linear.packed = PackedLinear.of(weight.detach(), self.matmul_dtype)
        self._stamp, self._packed_layers = stamp, ready

    def new_cache(self, batch_size: int, capacity: int, kind: str = "ragged", **options) -> RowCache:
        """As `ModelForward.new_cache`."""
        return new_cache(self.config, batch_size, kind, capacity=capacity, device=self.device, **options)

    def __call__(self, x: Tensor, counts: list[int], cache: RowCache, tree: TreeShape | None = None) -> Tensor:
        """States [B * q, H] before the norm, of embeddings x [B, q, H]; the cache's lengths are left to advance."""
        batch, count = x.shape[:2]
        cache.reserve(counts, count)
        index, positions = row_positions(cache, counts, count, x.device, tree)
        mask = self.masks(cache, index, positions, self.dtype, tree)
        if self._layers is not None and batch * count <= MAX_ROWS:
            return self._layers(x.reshape(batch * count, -1), positions, mask, cache)[0]
        return self.stack(x, mask, positions, cache).flatten(0, 1)


class _Linear:
    def __init__(self, weight: Callable[[], Tensor]):
        self.weight = weight
        self.packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight()) if self.packed is None else self.packed(x)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))
