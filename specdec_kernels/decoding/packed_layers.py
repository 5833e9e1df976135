"""Layers of Llama-shaped models for few tokens on CPU: prepacked, fused matrices and no per-module overhead.

A float32 matrix product with few rows should cost what reading the weight costs, but torch's own packs the matrix on every
call. Packing it once, in oneDNN's layout, removes that: a dozen rows take about as long as one, for a second copy of every
matrix, which doubles the memory of the weights. Joining q/k/v and gate/up, a grouped-query attention that does not repeat the
keys, and skipping the module and decorator calls remove most of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RowCache

MAX_ROWS = 128
"""Tokens of a forward up to which packed matrices are used."""


def drafting_dtype(wanted: torch.dtype | None = None) -> torch.dtype:
    """What a drafter multiplies in: `wanted`, float32 or bfloat16, or where it is None bfloat16 if this processor has instructions
    for it. Few rows take as long as reading the weights does, and a draft that rounding changes is verified like any other."""
    if wanted not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"drafter: matmul_dtype must be None, torch.float32 or torch.bfloat16, got {wanted}")
    if wanted is not None:
        return wanted
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return torch.bfloat16 if native else torch.float32


class PackedLinear:
    """y = x W^T + b, float32, with W [N, K] packed once for few rows of x. Costs a second copy of W, in `dtype`, to which x is
    rounded as well; sums are in float32."""

    def __init__(self, *linears: nn.Linear, dtype: torch.dtype = torch.float32):
        weight = torch.cat([m.weight.detach() for m in linears]) if len(linears) > 1 else linears[0].weight.detach()
        bias = [m.bias.detach() for m in linears if m.bias is not None]
        if bias and len(bias) != len(linears):
            bias = [m.bias.detach() if m.bias is not None else m.weight.new_zeros(m.out_features) for m in linears]
        self._pack(weight, torch.cat(bias) if bias else None, dtype)

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype = torch.float32) -> PackedLinear:
        """From W [N, K] itself."""
        self = cls.__new__(cls)
        self._pack(weight, None, dtype)
        return self

    def _pack(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.bias = bias if bias is None else bias.to(dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), MAX_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self.dtype is torch.float32:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "").float()


class PackedNorm:
    """RMSNorm in four calls, x / hypot(|x|, sqrt(n eps)) * sqrt(n) w; torch's own makes about ten on the CPU."""

    def __init__(self, module: Any):
        size = module.weight.shape[0]
        self.floor = torch.tensor((size * module.variance_epsilon) ** 0.5)
        self.weight = module.weight.detach() * size**0.5

    def __call__(self, x: Tensor) -> Tensor:
        return torch.div(x, torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)).mul_(self.weight)


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1 = PackedNorm(layer.input_layernorm)
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype)
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (PackedNorm(m) if m is not None else None for m in head_norms)
        self.out = PackedLinear(attention.o_proj, dtype=dtype)
        self.scale = attention.scaling
        self.norm2 = PackedNorm(layer.post_attention_layernorm)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj, dtype=dtype)
        self.act = mlp.act_fn
        self.down = PackedLinear(mlp.down_proj, dtype=dtype)


class PackedLayers:
    """Decoder layers of a Llama, Mistral, Qwen2 or Qwen3, packed. `unfit_layers` says what cannot be.

    layers, rotary: of the base model · config: its text config · packed: the first layers, where another one has packed them · dtype: of the matrices
    of the others (`PackedLinear`).
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rotary: Any,
        config,
        packed: Sequence[_Layer] = (),
        dtype: torch.dtype = torch.float32,
    ):
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._rotary = rotary
        self._sign = torch.ones(self._dim)
        self._sign[: self._dim // 2] = -1
        self.layers = [*packed, *(_Layer(layer, dtype) for layer in layers[len(packed) :])]

    def __call__(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: RowCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """States [B * q, H] behind the last layer, and those behind the layers `taps`.

        x: [B * q, H] · positions: [B, q] · mask: additive, or None for causal attention · cache: reserved for the forward.
        """
        batch, count = positions.shape
        total, heads, kv_heads, dim = batch * count, self._heads, self._kv_heads, self._dim
        group = heads // kv_heads
        if mask is None and count > 1:
            mask = torch.zeros(count, count).masked_fill_(
                torch.ones(count, count, dtype=torch.bool).triu_(1), -torch.inf
            )
            mask = mask[None, None]
        if mask is not None:
            mask = mask.repeat(1, 1, group, 1)  # [B, 1, group * q, kv]
        cos, sin = self._rotary(x, position_ids=positions)
        cos, sin = cos.view(-1, 1, dim).expand(total, 1, dim), (sin * self._sign).view(-1, 1, dim).expand(total, 1, dim)
        states = {}

        # As few calls as it takes: each finds the processor's caches full of weights and costs microseconds.
        for layer_index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.norm1(x)).view(total, heads + 2 * kv_heads, dim)
            qk = qkv.narrow(1, 0, heads + kv_heads)
            if layer.q_norm is not None:
                qk = torch.cat([layer.q_norm(qk[:, :heads]), layer.k_norm(qk[:, heads:])], 1)
            # rotate_half(x) * sin is a half-turn of x times sin with its first half negated.
            qk = torch.mul(qk, cos).addcmul_(torch.roll(qk, dim // 2, -1), sin)
            key = qk.narrow(1, heads, kv_heads).view(batch, count, kv_heads, dim).transpose(1, 2)
            value = qkv.narrow(1, heads + kv_heads, kv_heads).view(batch, count, kv_heads, dim).transpose(1, 2)
            key, value = cache.update(key, value, layer_index)
            # The queries of a group share their keys: [B, Hk, group * q, D] against [B, Hk, kv, D], nothing repeated.
            query = qk.narrow(1, 0, heads).view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
            query = query.reshape(batch, kv_heads, group * count, dim)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale)
            mixed = mixed.view(batch, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4).reshape(total, heads * dim)
            x = layer.out(mixed).add_(x)
            gate, up = layer.gate_up(layer.norm2(x)).chunk(2, -1)
            x = layer.down(layer.act(gate).mul_(up)).add_(x)
            if layer_index in taps:
                states[layer_index] = x
        return x, states


def unfit_layers(model: nn.Module, config, names: tuple[str, ...]) -> str | None:
    """Why the layers of `model`, whose class must be one of `names`, cannot be packed, or None."""
    if type(model).__name__ not in names:
        return f"model must be one of {', '.join(names)}, got {type(model).__name__}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch build has no oneDNN"
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        return "parameters must be float32 on the CPU"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention must be torch's own, got {config._attn_implementation!r}"
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "layers must be of one kind"
    # Neither is called on the fast path.
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        return "modules must have no forward hooks and no forward of their own instance"
    # Adapters and parametrizations change the class.
    if any(type(m) is not nn.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))):
        return "projections must be plain nn.Linear"
    return None
