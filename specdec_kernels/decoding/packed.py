"""A forward for few tokens on CPU: prepacked, fused matrices and no per-module overhead, for Llama-shaped models.

A float32 matrix product with few rows should cost what reading the weight costs, but torch's own packs the matrix on every
call. Packing it once, in oneDNN's layout, removes that: a dozen rows take about as long as one, for a second copy of every matrix,
which doubles the memory of the weights. Joining q/k/v and gate/up, a grouped-query attention that does not repeat the keys,
and skipping the module and decorator calls remove most of the rest.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RowCache
from .forward import ForwardOutput, ModelForward, model_lock, row_positions, wanted_rows

_log = logging.getLogger(__name__)

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TOLERANCE = 1e-3
#: Row counts for which both paths are compared: all that a single request has, some of those of batches.
COMPARED = (*range(1, 17), 32, 64, 128)


class _PackedLinear:
    """y = x W^T + b with W [N, K] packed once for up to `MAX_ROWS` rows of x. Costs a second copy of W."""

    def __init__(self, *linears: nn.Linear):
        weight = torch.cat([m.weight.detach() for m in linears]) if len(linears) > 1 else linears[0].weight.detach()
        bias = [m.bias.detach() for m in linears if m.bias is not None]
        if bias and len(bias) != len(linears):
            bias = [m.bias.detach() if m.bias is not None else m.weight.new_zeros(m.out_features) for m in linears]
        self.bias = torch.cat(bias) if bias else None
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PackedForward.MAX_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class _Norm:
    """RMSNorm in four calls, x / hypot(|x|, sqrt(n eps)) * sqrt(n) w; torch's own makes about ten on the CPU."""

    def __init__(self, module: Any):
        size = module.weight.shape[0]
        self.floor = torch.tensor((size * module.variance_epsilon) ** 0.5)
        self.weight = module.weight.detach() * size**0.5

    def __call__(self, x: Tensor) -> Tensor:
        return torch.div(x, torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)).mul_(self.weight)


class _Layer:
    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1 = _Norm(layer.input_layernorm)
        self.qkv = _PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (_Norm(m) if m is not None else None for m in head_norms)
        self.out = _PackedLinear(attention.o_proj)
        self.scale = attention.scaling
        self.norm2 = _Norm(layer.post_attention_layernorm)
        self.gate_up = _PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.act = mlp.act_fn
        self.down = _PackedLinear(mlp.down_proj)


class _Stamp:
    """What a packed copy was made from: the modules, and identity, storage and version of the parameters, norms' epsilons."""

    def __init__(self, model):
        self.modules = tuple(model.modules())
        self.tensors = list(model.parameters())
        self.marks = [(t.data_ptr(), t._version) for t in self.tensors]
        self.epsilons = [getattr(m, "variance_epsilon", None) for m in self.modules]

    def same(self, other: _Stamp) -> bool:
        # Both hold their tensors, so an identity is not taken over by a new one.
        return (
            self.modules == other.modules
            and [id(t) for t in self.tensors] == [id(t) for t in other.tensors]
            and self.marks == other.marks
            and self.epsilons == other.epsilons
        )


class PackedForward(ModelForward):
    """`ModelForward` with a fast path for at most `MAX_ROWS` tokens in all; more tokens (prefill) take the model's own.

    The construction packs the weights, which doubles their memory, and compares both paths on random tokens; use `build`,
    which says None or raises where the model, its dtype or the machine does not fit.

    `refresh` (once per `generate`) packs again what has changed since, and leaves every forward to the model where that
    no longer fits, say because of a hook. It goes by the modules and by identity, storage and version of their tensors:
    values written through `.data` leave no trace there, so call `repack` after that. Weights and hooks must not change
    while a `generate` runs.
    """

    MAX_ROWS = 128

    def __init__(self, model):
        super().__init__(model)
        with model_lock(model):
            reason = self.unfit(model)
            if reason:
                raise ValueError(f"PackedForward: {reason}")
            self.repack()

    def repack(self) -> None:
        """Packs the model's weights as they are now; ArithmeticError where both paths then disagree."""
        with model_lock(self.model), torch.inference_mode(False), torch.no_grad():
            self._fits, self._disagreement = False, None
            self._layers = []  # frees the old copy before the new one is made
            self._stamp = _Stamp(self.model)
            self._pack()
            self._fits = True
            try:
                self._compare()
            except ArithmeticError as error:
                self._fits, self._disagreement = False, str(error)
                raise

    def refresh(self) -> None:
        with model_lock(self.model):
            reason = self.unfit(self.model)
            if reason is None and not self._stamp.same(_Stamp(self.model)):
                with contextlib.suppress(ArithmeticError):  # kept in _disagreement
                    self.repack()
            reason = reason or self._disagreement
            self._fits = reason is None
        if reason:
            _log.info("packed forward not used: %s", reason)

    def _pack(self) -> None:
        config, base = self.config, self.model.model
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._embed, self._rotary, self._final_norm = base.embed_tokens, base.rotary_emb, _Norm(base.norm)
        half = torch.ones(self._dim)
        half[: self._dim // 2] = -1
        self._sign = half
        self._packed_head = _PackedLinear(self.model.lm_head)
        self._layers = [_Layer(layer) for layer in base.layers]

    @staticmethod
    def unfit(model) -> str | None:
        """Why `model` cannot take the fast path, or None."""
        if type(model).__name__ not in _MODELS:
            return f"model must be one of {', '.join(_MODELS)}, got {type(model).__name__}"
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this torch build has no oneDNN"
        if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
            return "parameters must be float32 on the CPU"
        config = model.config
        if config._attn_implementation not in ("sdpa", "eager"):
            return f"attention must be torch's own, got {config._attn_implementation!r}"
        if len(set(getattr(config, "layer_types", None) or ())) > 1:
            return "layers must be of one kind"
        # Versions are how `refresh` sees a change.
        if any(p.is_inference() for p in model.parameters()):
            return "parameters must not be inference tensors, which have no version"
        # Neither is called on the fast path.
        if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
            return "modules must have no forward hooks and no forward of their own instance"
        # Adapters and parametrizations change the class.
        if any(type(m) is not nn.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))):
            return "projections must be plain nn.Linear"
        return None

    @classmethod
    def build(cls, model, required: bool = False) -> PackedForward | None:
        """The fast path of `model`, or None (an error where `required`) if it does not fit or does not agree."""
        reason = cls.unfit(model)
        if reason is None:
            try:
                return cls(model)
            except ArithmeticError as error:
                reason = str(error)
        if required:
            raise ValueError(f"PackedForward: {reason}")
        _log.info("packed forward not used: %s", reason)
        return None

    def _compare(self) -> None:
        """Raises ArithmeticError unless both paths agree on random tokens, for the row counts in COMPARED."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (1, 8 + self.MAX_ROWS), generator=generator)
        cache = self.new_cache(1, capacity=tokens.shape[1])
        super().__call__(tokens[:, :8], [8], cache, last_only=True)
        cache.advance([8])
        expected = super().__call__(tokens[:, 8:], [self.MAX_ROWS], cache).logits
        for count in COMPARED:
            got = self(tokens[:, 8 : 8 + count], [count], cache).logits
            error = (got - expected[:count]).abs().max().item()
            limit = _TOLERANCE * expected.std().item()
            if not error <= limit:
                raise ArithmeticError(
                    f"{count} tokens: logits differ by {error:.2e} from the model's own, limit {limit:.2e}"
                )

    def __call__(self, tokens: Tensor, counts: list[int], cache: RowCache, *, last_only: bool = False) -> ForwardOutput:
        batch, count = tokens.shape
        total = batch * count
        if total > self.MAX_ROWS or not self._fits:
            return super().__call__(tokens, counts, cache, last_only=last_only)
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        group = heads // kv_heads
        cache.reserve(counts, count)
        index, positions = row_positions(cache, counts, count, tokens.device)
        mask = self._mask(cache, index)
        if mask is None and count > 1:
            mask = torch.zeros(count, count).masked_fill_(
                torch.ones(count, count, dtype=torch.bool).triu_(1), -torch.inf
            )
            mask = mask[None, None]
        if mask is not None:
            mask = mask.repeat(1, 1, group, 1)  # [B, 1, group * q, kv]
        x = self._embed(tokens).view(total, -1)
        cos, sin = self._rotary(x, position_ids=positions)
        cos, sin = cos.view(-1, 1, dim).expand(total, 1, dim), (sin * self._sign).view(-1, 1, dim).expand(total, 1, dim)

        # As few calls as it takes: each finds the processor's caches full of weights and costs microseconds.
        for layer_index, layer in enumerate(self._layers):
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

        rows = wanted_rows(counts, count, last_only, x.device)
        hidden = self._final_norm(x if rows is None else x.index_select(0, rows))
        return ForwardOutput(self._packed_head(hidden), hidden)
