"""The DSpark drafter's network (2607.05147): a block of drafts in one pass over the target's states, a Markov bias, confidences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from ..draft_vocab import target_to_draft_from_d2t
from .dspark_config import DSparkConfig
from .dspark_files import read_checkpoint, write_checkpoint

# transformers 5.24 renamed the argument; passing the old name there warns on every call.
_CACHE = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"


class MarkovHead(nn.Module):
    """The bias W1[x_{k-1}] W2 of a draft's logits, from the token before it."""

    def __init__(self, vocab_size: int, columns: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft is accepted."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


class _Unowned:
    """Holds the target: no submodule, so that its parameters are not the drafter's, and not copied with it."""

    def __init__(self, module: Any):
        self.module = module

    def __deepcopy__(self, memo) -> _Unowned:
        return self


class _Context:
    """Stands in for a cache: every layer's context keys and values [B, Hk, S, D] come before those of the blocks."""

    def __init__(self, states: list[tuple[Tensor, Tensor]]):
        self.states = states

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        context_key, context_value = self.states[layer_idx]
        return torch.cat([context_key, key], 2), torch.cat([context_value, value], 2)


class DSparkModel(nn.Module):
    """Drafts block_size tokens at once behind a text, from the target's hidden states of it.

    With g = hidden_norm(fc([target states of the tapped layers])) of every token before the anchor, each layer's keys and values
    of the context are k_norm(W_k g) under the rotation of the token's position, and W_v g. The block is the anchor token and
    block_size - 1 masks at the positions from the anchor's on; its slots attend the context and each other. Slot k gives

        logits_k = logit_scale · (lm_head(h_k) + W1[x_{k-1}] W2),    c_k = sigmoid(w · [h_k; W1[x_{k-1}]] + b)

    of draft x_k, the token behind it; x_0 is the anchor.

    Parameters have the names of the public layout. `embed_tokens` and `lm_head` are the drafter's own, frozen, or are read from
    `target` at every call: then they are no parameters of this module and `save` leaves them out.

    Args:
        config: see `DSparkConfig`.
        target: the transformers causal LM to draft for.
        own_embeddings, own_head: whether the drafter has an `embed_tokens`, a `lm_head` of its own. A reduced vocabulary needs
            the latter. New ones are copies of the target's (of its rows `d2t`), or random and not frozen where the widths differ.
        d2t: int32/int64 [draft_vocab_size] for a reduced vocabulary: column j is target id j + d2t[j].

    Raises:
        ValueError: drafter and target do not fit (`check_target`).
    """

    d2t: Tensor | None

    def __init__(
        self, config: DSparkConfig, target, *, own_embeddings: bool = False, own_head: bool | None = None,
        d2t: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config = config
        own_head = d2t is not None if own_head is None else own_head
        backbone, width = config.backbone, config.backbone.hidden_size
        self._target = _Unowned(target)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=backbone.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(backbone, i) for i in range(backbone.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=backbone.rms_norm_eps)
        self.markov_head = MarkovHead(backbone.vocab_size, config.draft_vocab_size, config.markov_rank)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(width + config.confidence_head_with_markov * config.markov_rank)
        self.embed_tokens = nn.Embedding(backbone.vocab_size, width) if own_embeddings else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if own_head else None
        self.register_buffer("d2t", d2t)
        # No submodule either: a change of dtype must not round its frequencies.
        with torch.device("cpu"):
            self._rotary = [Qwen3RotaryEmbedding(backbone)]
        self.check_target(target)
        self._initialise(target)

    @torch.no_grad()
    def _initialise(self, target) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, self.config.backbone.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        self.markov_head.markov_w2.weight.zero_()  # no bias at first; W1 is not 0, so W2 has a gradient
        if self.confidence_head is not None:
            self.confidence_head.proj.weight.zero_()
        self._take_over(self.embed_tokens, target.get_input_embeddings().weight)
        rows = self.kept_ids
        self._take_over(self.lm_head, _head(target) if rows is None else _head(target)[rows.to(_head(target).device)])

    @staticmethod
    def _take_over(module: nn.Embedding | nn.Linear | None, given: Tensor) -> None:
        """Freezes a module of the drafter's own as a copy of the target's; one of another width has to be trained instead."""
        if module is None:
            return
        meta = module.weight.is_meta  # about to be loaded
        if meta or module.weight.shape[1] == given.shape[1]:
            module.requires_grad_(False)
        if not meta and not module.weight.requires_grad:
            shared = min(len(module.weight), len(given))
            module.weight[:shared].copy_(given[:shared])

    @classmethod
    def load(cls, path: Path | str, target, *, dtype: torch.dtype | None = None, device=None) -> DSparkModel:
        """Reads a checkpoint in the public layout: config.json and model.safetensors, or shards with an index.

        Follows the loaders of engines: `t2d` and `mask_embedding` are skipped, a confidence head that the config does not
        enable too, and one that the file does not have is left out.

        Args:
            path: directory.
            target: the model to draft for; `embed_tokens` and `lm_head` are its own where the checkpoint has none.
            dtype: of the parameters; None: that of `fc.weight` in the file. The confidence head keeps its own.
            device: None: the target's.

        Raises:
            ValueError: a key, a tensor (missing, not known, of another shape or dtype) or a file that does not fit, by name.
                Nothing is loaded then.
        """
        config, tensors = read_checkpoint(path)
        d2t = tensors.get("d2t")
        with torch.device("meta"):
            model = cls(
                config, target, own_embeddings="embed_tokens.weight" in tensors,
                own_head="lm_head.weight" in tensors, d2t=None if d2t is None else d2t.to("cpu"),
            )  # fmt: skip
        wanted = model.state_dict()
        missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        if missing or unknown:
            name, what = (missing[0], "is missing") if missing else (unknown[0], "is not known")
            raise ValueError(f"DSpark checkpoint {path}: tensor {name!r} {what}")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                raise ValueError(
                    f"DSpark checkpoint {path}: tensor {name!r} must be {list(wanted[name].shape)}, got {list(tensor.shape)}"
                )
        dtype, device = dtype or tensors["fc.weight"].dtype, device or target.device
        for name, tensor in tensors.items():
            keep = name == "d2t" or name.startswith("confidence_head")
            tensors[name] = tensor.to(device=device, dtype=None if keep else dtype)
        model.load_state_dict(tensors, assign=True)
        return model.eval()

    def save(self, path: Path | str) -> None:
        """Writes config.json and model.safetensors into the directory `path`, which is made."""
        config = self.config.to_dict() | {"dtype": str(self.fc.weight.dtype).removeprefix("torch.")}
        write_checkpoint(path, config, self.state_dict())

    @property
    def target(self):
        """The model that is drafted for."""
        return self._target.module

    @property
    def kept_ids(self) -> Tensor | None:
        """Target id of each column, int64 [draft_vocab_size], where the vocabulary is reduced, else None."""
        if self.d2t is None:
            return None
        return self.d2t.to(torch.int64) + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_to_draft(self) -> Tensor | None:
        """int32 [V], column of each target id or -1, or None where ids are columns."""
        if self.d2t is None:
            return None
        return target_to_draft_from_d2t(self.d2t, _head(self.target).shape[0], offsets=True)

    def check_target(self, target) -> None:
        """Raises ValueError where the drafter does not fit `target`, saying what it needs and what it got."""
        config, text = self.config, target.config.get_text_config()
        width, ids = config.backbone.hidden_size, config.backbone.vocab_size

        def check(ok: bool, name: str, must: str, got: Any) -> None:
            if not ok:
                raise ValueError(f"DSpark drafter: {name} must be {must}, got {got}")

        layers = text.num_hidden_layers
        wanted = config.num_target_layers
        check(wanted in (None, layers), "num_target_layers", f"the target's {layers}", wanted)
        highest = config.target_layer_ids[-1]
        check(highest < layers, "target_layer_ids", f"below the target's {layers} layers", highest)
        check(config.target_hidden_size == text.hidden_size, "target_hidden_size", f"the target's {text.hidden_size}",
              config.target_hidden_size)  # fmt: skip
        inputs, vocab = target.get_input_embeddings().weight.shape[0], _head(target).shape[0]
        check(ids >= vocab, "vocab_size", f"at least the target's {vocab} ids", ids)
        if self.embed_tokens is None:
            check(ids == inputs, "embed_tokens.weight", f"in the checkpoint for a vocab_size other than the target's {inputs}",
                  f"none for {ids}")  # fmt: skip
            check(width == text.hidden_size, "embed_tokens.weight",
                  f"in the checkpoint for a hidden_size other than the target's {text.hidden_size}", f"none for {width}")  # fmt: skip
        columns = config.draft_vocab_size
        if self.lm_head is None:
            check(columns == vocab, "lm_head.weight",
                  f"in the checkpoint for a draft_vocab_size other than the target's {vocab}", f"none for {columns}")  # fmt: skip
            check(width == text.hidden_size, "lm_head.weight",
                  f"in the checkpoint for a hidden_size other than the target's {text.hidden_size}", f"none for {width}")  # fmt: skip
            check(getattr(target.get_output_embeddings(), "bias", None) is None, "lm_head.weight",
                  "in the checkpoint where the target's LM head has a bias", "none")  # fmt: skip
        reduced = columns < vocab
        check((self.d2t is not None) == reduced, "d2t",
              f"in the checkpoint exactly where draft_vocab_size is below the target's {vocab}",
              f"{'none' if self.d2t is None else 'one'} for {columns}")  # fmt: skip
        if self.d2t is not None:
            check(self.d2t.shape == (columns,), "d2t", f"[draft_vocab_size={columns}]", list(self.d2t.shape))
            if not self.d2t.is_meta:
                target_to_draft_from_d2t(self.d2t, vocab, offsets=True)

    # The network.

    @property
    def frequencies(self) -> Tensor:
        """Rotations of a head's pairs, float32 [D / 2], in rad a position."""
        return self._rotary[0].inv_freq

    def rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, n, D] of the positions, in the dtype of x."""
        rotary = self._rotary[0]
        if rotary.inv_freq.device != x.device:
            rotary.to(x.device)
        return rotary(x, position_ids=positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of any ids, masks included, in the dtype of the layers."""
        weight = (
            self.target.get_input_embeddings().weight.detach()
            if self.embed_tokens is None
            else self.embed_tokens.weight
        )
        return F.embedding(tokens, weight).to(self.fc.weight.dtype)

    def block_ids(self, anchors: Tensor) -> Tensor:
        """The slots' input ids, int64 [.., block_size]: each anchor token and masks."""
        masks = anchors.new_full((*anchors.shape, self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat([anchors[..., None], masks], -1)

    def context(self, states: Tensor) -> Tensor:
        """g [.., H] of the target's states [.., T * Ht], those of the layers side by side."""
        return self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))

    def context_kv(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's keys and values [B, Hk, n, D] of `context` [B, n, H] at `positions` [B, n]."""
        cos, sin = self.rotary(context, positions)
        kept = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*context.shape[:-1], -1, attention.head_dim)
            key = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            value = attention.v_proj(context).view(shape).transpose(1, 2)
            kept.append((apply_rotary_pos_emb(key, key, cos, sin)[0], value))
        return kept

    def run_layers(self, x: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: Any) -> Tensor:
        """States h [B, n, H] of slots with the inputs x at `positions`; masks: additive, of each layer, over what
        `cache.update` returns."""
        rope = self.rotary(x, positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(
                x, attention_mask=mask, position_ids=positions, position_embeddings=rope, **{_CACHE: cache}
            )  # fmt: skip
        return self.norm(x)

    def masks(self, hidden: Tensor, query: Tensor, key: Tensor, own: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The layers' additive masks [B or 1, 1, q, n].

        hidden: bool [B or 1, q, n], of what no layer sees · query [B, q, 1], key [B or 1, 1, n]: positions · own: bool, keys
        that are slots of the block, which come with their positions too.
        """
        made: dict[tuple[int, bool], Tensor] = {}
        for kind in zip(self.config.windows, self.config.causal, strict=True):
            if kind in made:
                continue
            window, causal = kind
            out = hidden
            if causal:
                out = out | (own & (key > query))
            if window:
                out = out | ((query - key).abs() >= window)
            # Not -inf: a row of which nothing is visible must not become NaN.
            mask = torch.zeros(out.shape, dtype=dtype, device=out.device)
            made[kind] = mask.masked_fill_(out, torch.finfo(dtype).min)[:, None]
        return [made[kind] for kind in zip(self.config.windows, self.config.causal, strict=True)]

    def forward_blocks(
        self, states: Tensor, tokens: Tensor, anchors: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """h of many blocks of each text at once, as decoding gives them one by one: block a sees the context before its anchor
        and itself. Differentiable.

        Args:
            states: [B, S, T * Ht], the target's states of the first S tokens.
            tokens: int64 [B, N], N >= S, the text. Padding behind it is never seen.
            anchors: int64 [B, A], index of each block's first token, in [0, min(S, N - 1)].
            positions: int64 [B, N], positions of the tokens; None: 0, 1, ...

        Returns:
            [B, A, block_size, H], what `lm_head` and the confidence head read.
        """
        batch, count = anchors.shape
        length, slots = states.shape[1], self.config.block_size
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(batch, -1)
        offset = torch.arange(slots, device=tokens.device)
        query = (positions.gather(1, anchors)[..., None] + offset).flatten(1)
        block = torch.arange(count, device=tokens.device).repeat_interleave(slots)
        x = self.embed(self.block_ids(tokens.gather(1, anchors))).flatten(1, 2)
        before = torch.arange(length, device=tokens.device) < anchors.repeat_interleave(slots, 1)[..., None]
        same = (block[:, None] == block).expand(batch, -1, -1)
        key = torch.cat([positions[:, :length], query], 1)[:, None]
        own = torch.arange(key.shape[-1], device=tokens.device) >= length
        masks = self.masks(~torch.cat([before, same], 2), query[..., None], key, own, x.dtype)
        kept = _Context(self.context_kv(self.context(states), positions[:, :length]))
        return self.run_layers(x, query, masks, kept).unflatten(1, (count, slots))

    def target_head(self) -> Tensor:
        """The target's LM head [V, Ht], without a gradient."""
        return _head(self.target).detach()

    def head(self) -> Tensor:
        """The rows of `lm_head` [Vd, H] for the columns that are target ids."""
        if self.lm_head is None:
            return self.target_head()
        return self.lm_head.weight[: _head(self.target).shape[0]]

    def markov_tables(self) -> tuple[Tensor, Tensor]:
        """W1 [V, r] and W2 [Vd, r], the latter times `logit_scale`."""
        w2 = self.markov_head.markov_w2.weight[: self.head().shape[0]]
        scale = self.config.logit_scale
        return self.markov_head.markov_w1.weight, w2 if scale == 1.0 else w2 * scale

    def base_logits(self, hidden: Tensor) -> Tensor:
        """logit_scale · lm_head(h), [.., Vd]."""
        head, scale = self.head(), self.config.logit_scale
        logits = F.linear(hidden.to(head.dtype), head)
        return logits if scale == 1.0 else logits * scale

    def block_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [.., Vd] in float32 of slots h, given the token before each draft, int64 [..]."""
        w1, w2 = self.markov_tables()
        return self.base_logits(hidden).float() + F.linear(F.embedding(before, w1).float(), w2.float())

    def confidence_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The logit of c_k, float32 [..], of slots h, given the token before each draft."""
        if self.confidence_head is None:
            raise ValueError("DSpark drafter: enable_confidence_head must be true for confidences, got False")
        proj = self.confidence_head.proj
        x = hidden.float()
        if self.config.confidence_head_with_markov:
            x = torch.cat([x, F.embedding(before, self.markov_head.markov_w1.weight).float()], -1)
        return F.linear(x, proj.weight.float(), proj.bias.float()).squeeze(-1)


def _head(target) -> Tensor:
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(f"DSpark drafter: target must have an LM head, got {type(target).__name__}")
    return head.weight
