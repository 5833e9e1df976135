"""A `DSparkModel` in decoding: context entries in a `RowCache`, one block of slots over them, logits."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .cache import RowCache
from .caches import new_cache
from .dspark_model import DSparkModel
from .packed_layers import MAX_ROWS, PackedLayers, PackedLinear, PackedNorm, drafting_dtype
from .transfers import on_device
from .weight_stamp import WeightStamp

_log = logging.getLogger(__name__)


class DSparkForward:
    """Runs a drafter's network over a cache with a length per row, which holds the context alone.

    In float32 on the CPU the matrices are packed (`PackedLinear`), for another copy of them, the LM head's included; `refresh`
    packs them again after a change.

    Args:
        model: the drafter.
        packed: "auto" packs where it fits, True requires it, False leaves torch's own.
        matmul_dtype: of the packed matrices; None: `drafting_dtype`.
    """

    def __init__(self, model: DSparkModel, packed: bool | str = "auto", matmul_dtype: torch.dtype | None = None):
        if packed not in (True, False, "auto"):
            raise ValueError(f'DSparkDrafter: packed must be True, False or "auto", got {packed!r}')
        self.model, self.packed, self.matmul_dtype = model, packed, drafting_dtype(matmul_dtype)
        self._stamp: WeightStamp | None = None
        self._packed: _Packed | None = None
        self.refresh()

    @property
    def device(self) -> torch.device:
        return self.model.fc.weight.device

    def new_cache(self, batch_size: int, capacity: int, kind: str, page_size: int) -> RowCache:
        """An empty cache of `capacity` tokens a row, which grows as needed."""
        return new_cache(
            self.model.config.backbone, batch_size, kind, capacity=capacity, page_size=page_size, device=self.device
        )

    def refresh(self) -> None:
        """Takes in what has changed about the weights since the last call, by their identity, storage and version."""
        model = self.model
        target = model.target
        tensors = [
            *model.parameters(),
            *(e().weight for e in (target.get_input_embeddings, target.get_output_embeddings)),
        ]
        reason = self._unfit(tensors)
        if reason is not None:
            if self.packed is True:
                raise ValueError(f"DSparkDrafter: cannot be packed: {reason}")
            if self.packed:
                _log.info("packed drafter not used: %s", reason)
            self._packed, self._stamp = None, None
            return
        stamp = WeightStamp(tensors)
        if self._stamp != stamp:
            self._packed = None  # frees the old copy before the new one is made
            with torch.inference_mode(False), torch.no_grad():
                self._packed = _Packed(model, self.matmul_dtype)
        self._stamp = stamp

    def _unfit(self, tensors: list[Tensor]) -> str | None:
        if not self.packed:
            return "packed=False"
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this torch build has no oneDNN"
        if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
            return "parameters must be float32 on the CPU"
        if any(t.is_inference() for t in tensors):
            return "parameters must not be inference tensors, which have no version"
        if len(set(zip(self.model.config.windows, self.model.config.causal, strict=True))) > 1:
            return "layers must be of one kind"
        return None

    def append(self, states: Tensor, counts: list[int], cache: RowCache) -> None:
        """Adds context to the cache: counts[b] tokens of row b, with the target's states [sum(counts), T * Ht], request-major."""
        width, batch = max(counts), len(counts)
        if width == 0:
            return
        offset = torch.arange(width, device=self.device)
        start = cache.lengths_tensor[:, None]
        rows, positions = None, start + offset
        if min(counts) < width:
            # Padding repeats a row's last token; nothing reads its entries, which are written over next.
            flat, first = [], 0
            for n in counts:
                flat += [first + min(i, max(n, 1) - 1) for i in range(width)]
                first += n
            rows = on_device([min(i, first - 1) for i in flat], torch.int64, self.device)
            states = states.index_select(0, rows)
        if self._packed is not None and batch * width <= MAX_ROWS:
            kept = self._packed.context_kv(states, positions)
        else:
            context = self.model.context(states).view(batch, width, -1)
            kept = self.model.context_kv(context, positions)
        cache.reserve(counts, width)
        for layer, (key, value) in enumerate(kept):
            cache.update(key, value, layer)
        cache.advance(counts)

    def block(self, anchors: Tensor, cache: RowCache, slots: int) -> Tensor:
        """h [B, slots, H] of the first slots of one block per row, behind the anchor tokens int64 [B]; the cache stays as it is."""
        model, batch = self.model, len(anchors)
        size = model.config.block_size
        cache.reserve([size] * batch, size)
        start = cache.lengths_tensor[:, None]
        positions = start + torch.arange(size, device=self.device)
        key = cache.key_positions(size)
        # Behind a row's context come its own slots, then what longer rows have.
        hidden = (key >= start + size)[:, None].expand(-1, size, -1)
        masks = model.masks(
            hidden, positions[..., None], key[None, None], (key >= start)[:, None], model.fc.weight.dtype
        )
        x = model.embed(model.block_ids(anchors))
        if self._packed is not None and batch * size <= MAX_ROWS:
            return self._packed.block(x, positions, masks[0], cache, slots)
        return model.run_layers(x, positions, masks, cache)[:, :slots]

    def logits(self, hidden: Tensor) -> Tensor:
        """`DSparkModel.base_logits`, contiguous and writable."""
        if self._packed is not None and hidden.numel() // hidden.shape[-1] <= MAX_ROWS:
            logits = self._packed.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
            scale = self.model.config.logit_scale
            return logits if scale == 1.0 else logits.mul_(scale)
        return self.model.base_logits(hidden)


class _Packed:
    """The packed matrices of a drafter."""

    def __init__(self, model: DSparkModel, dtype: torch.dtype):
        backbone = model.config.backbone
        self._rotary = model.rotary
        self._heads, self._dim = backbone.num_key_value_heads, backbone.head_dim
        layers: list[Any] = list(model.layers)
        attentions = [layer.self_attn for layer in layers]
        self._fc, self._norm = PackedLinear(model.fc, dtype=dtype), PackedNorm(model.hidden_norm)
        self._kv = PackedLinear(*(m for a in attentions for m in (a.k_proj, a.v_proj)), dtype=dtype)
        self._key_norms = [PackedNorm(a.k_norm) for a in attentions]
        self._sign = torch.ones(self._dim)
        self._sign[: self._dim // 2] = -1
        self._layers = PackedLayers(
            layers, lambda x, position_ids: model.rotary(x, position_ids), backbone, dtype=dtype
        )
        self._final_norm = PackedNorm(model.norm)
        self.head = PackedLinear.of(model.head().detach(), dtype)

    def context_kv(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`DSparkModel.context_kv` of states [B * n, T * Ht]."""
        (batch, width), dim = positions.shape, self._dim
        kv = self._kv(self._norm(self._fc(states.contiguous())))
        kv = kv.view(batch, width, len(self._key_norms), 2, self._heads, dim)
        cos, sin = self._rotary(kv, positions)
        cos, sin = cos[:, :, None], (sin * self._sign)[:, :, None]
        kept = []
        for layer, norm in enumerate(self._key_norms):
            key = norm(kv[:, :, layer, 0])
            # As in `PackedLayers`: a half-turn times sin with its first half negated.
            key = torch.mul(key, cos).addcmul_(torch.roll(key, dim // 2, -1), sin)
            kept.append((key.transpose(1, 2), kv[:, :, layer, 1].transpose(1, 2)))
        return kept

    def block(self, x: Tensor, positions: Tensor, mask: Tensor, cache: RowCache, slots: int) -> Tensor:
        batch, size = positions.shape
        x, _ = self._layers(x.reshape(batch * size, -1), positions, mask, cache)
        return self._final_norm(x.view(batch, size, -1)[:, :slots])
