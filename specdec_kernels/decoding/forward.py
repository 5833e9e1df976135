"""One forward of a causal LM over a `RowCache`: the new tokens of every row in, logits of the wanted rows out."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from . import paged_attention
from .cache import RowCache
from .paged_cache import PagedCache
from .ragged_cache import RaggedCache
from .support import UnsupportedModel, check_supported
from .transfers import on_device

_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model) -> threading.RLock:
    """The lock that everything in this package which puts hooks on `model`, or looks for them, takes."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


class ForwardOutput(NamedTuple):
    """`logits` [R, V] of the wanted rows, request-major · `hidden` [R, H], what the LM head read, or None."""

    logits: Tensor
    hidden: Tensor | None


class ModelForward:
    """Runs a transformers causal LM of full or sliding-window attention layers, unchanged.

    The model must take its positions from `position_ids` and its attention from the given mask alone; those known to
    take either from the cache's scalar length are refused by name. Forwards of one model from several threads are run
    one after the other.

    Args:
        model: a `PreTrainedModel` with an LM head, attention implementation "sdpa", "eager" or "specdec_paged"
            (`paged_attention`, with paged caches alone).

    Raises:
        UnsupportedModel: the architecture or the attention implementation is not supported.
    """

    def __init__(self, model):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        check_supported(self.config)
        if getattr(model, "_is_stateful", False):
            raise UnsupportedModel(f"decoding: {type(model).__name__} keeps recurrent state")
        implementation = self.config._attn_implementation
        if implementation not in ("sdpa", "eager", paged_attention.NAME):
            raise UnsupportedModel(
                f'{type(model).__name__}: attention implementation must be "sdpa" or "eager" (a mask per row), or '
                f'"{paged_attention.NAME}" with a paged cache, got {implementation!r}'
            )
        parameters = inspect.signature(model.forward).parameters
        reason = None
        # Such a forward takes the argument as one of its **kwargs and drops it.
        if "position_ids" not in parameters:
            reason = "its forward takes no position_ids, so rows of different lengths would get each other's positions"
        elif "cache" not in parameters and "past_key_values" not in parameters:
            reason = "its forward takes no cache"
        elif any(
            name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
            for name, module in model.named_modules()
        ):
            reason = "its positions count from behind the padding id, as RoBERTa's do, not from 0"
        if reason:
            raise UnsupportedModel(
                f"decoding: {type(model).__name__} (model type {self.config.model_type!r}) is not supported: {reason}"
            )
        # transformers 5.24 renamed the argument; passing the old name there warns on every call.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is None:
            kinds = ["sliding_attention" if window else "full_attention"] * self.config.num_hidden_layers
        self._kinds = sorted(set(kinds))
        self._window = window
        self._windows = [int(window) if kind == "sliding_attention" else 0 for kind in kinds]
        self._implementation = implementation
        self._reads_pages = implementation == paged_attention.NAME
        if self._reads_pages:
            paged_attention.check_model(model)
        self._head = model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Columns of the logits; may exceed the tokenizer's size by padding."""
        return self._head.weight.shape[0] if self._head is not None else self.config.vocab_size

    def new_cache(self, batch_size: int, capacity: int, kind: str = "ragged", **options) -> RowCache:
        """An empty cache of `capacity` tokens a row, which grows as needed; kind: one of `CACHES`; options: `page_size` of a paged
        one, `budget` and `sinks` of `RowCache`."""
        options |= {"capacity": capacity, "device": self.device}
        if kind == "paged":
            return PagedCache(self.config, batch_size, gather=not self._reads_pages, **options)
        if self._reads_pages:
            raise ValueError(f'attention implementation "{paged_attention.NAME}" needs cache="paged", got {kind!r}')
        options.pop("page_size", None)
        return RaggedCache(self.config, batch_size, **options)

    def refresh(self) -> None:
        """Takes in what has changed about the model since the last call; decoders call it once per `generate`."""

    def __call__(self, tokens: Tensor, counts: list[int], cache: RowCache, *, last_only: bool = False) -> ForwardOutput:
        """Feeds counts[b] tokens of row b; the cache's lengths are left for the caller to advance.

        Args:
            tokens: int64 [B, q], row b's tokens first, then padding of any valid id.
            counts: tokens per row, 0 <= counts[b] <= q; a row without any gives no logits, or with `last_only` some that mean
                nothing.
            cache: the rows' cache.
            last_only: logits of each row's last token alone ([B, V]) instead of all sum(counts) of them.
        """
        if self.config._attn_implementation != self._implementation:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: attention implementation was {self._implementation!r} when this forward was made "
                f"and is {self.config._attn_implementation!r} now; make a new decoder"
            )
        cache.reserve(counts, tokens.shape[1])
        rows = wanted_rows(counts, tokens.shape[1], last_only, tokens.device)
        index, positions = row_positions(cache, counts, tokens.shape[1], tokens.device)
        pages = cache.forward_of(counts, tokens.shape[1], self._windows)
        mask = self._mask(cache, index) if pages is None else None
        captured: list[Tensor] = []
        caller = threading.get_ident()

        def gather(_module, args):
            # The caller's own use of the model in another thread takes no lock.
            if threading.get_ident() != caller:
                return None
            hidden = args[0].reshape(-1, args[0].shape[-1])
            hidden = hidden if rows is None else hidden.index_select(0, rows)
            captured.append(hidden)
            return (hidden[None], *args[1:])

        # Gathering before the LM head spares the logits of padding, and keeps whatever the model does after the head.
        with model_lock(self.model), paged_attention.Serving(pages):
            hook = self._head.register_forward_pre_hook(gather) if self._head is not None else None
            try:
                logits = self.model(
                    input_ids=tokens,
                    position_ids=positions,
                    attention_mask=mask,
                    use_cache=True,
                    **{self._cache_argument: cache},
                ).logits
            finally:
                if hook is not None:
                    hook.remove()
        logits = logits.reshape(-1, logits.shape[-1])
        if not captured and rows is not None:
            logits = logits.index_select(0, rows)
        return ForwardOutput(logits, captured[0] if captured else None)

    def _mask(self, cache: RowCache, index: Tensor):
        """None where causal attention over the returned entries needs no mask, a 4D mask, or one per layer type.

        index: the entry that each query writes, [B, q].
        """
        count = index.shape[1]
        end, budget = cache.max_length + count, cache.budget
        if budget is not None and budget >= end:
            budget = None
        if (
            budget is None
            and self._kinds == ["full_attention"]
            and cache.uniform
            and (count == 1 or cache.max_length == 0)
        ):
            return None
        key = cache.key_positions(count)
        if key.dim() > 1:
            key = key[:, None, None]
        dtype = self.model.dtype
        masks = {}
        for kind in self._kinds:
            hidden = key > index[:, None, :, None]
            if kind == "sliding_attention":
                hidden = hidden | (key <= index[:, None, :, None] - self._window)
            if budget is not None:
                hidden = hidden | ((key <= index[:, None, :, None] - budget) & (key >= cache.sinks))
            masks[kind] = torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(
                hidden, torch.finfo(dtype).min
            )
        # One causal mask for a model of both kinds would silently widen its windows.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def row_positions(cache: RowCache, counts: list[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cache entries that a forward of `width` tokens per row writes, and the positions to embed there; int64 [B, width].

    They differ in padding alone, which repeats its row's last position: a row near the model's limit may be padded to
    the width of another one, past the last row of a learned position table.
    """
    offset = torch.arange(width, device=device)
    start = cache.lengths_tensor[:, None]
    index = start + offset
    if all(n == width for n in counts):
        return index, index
    last = on_device(counts, torch.int64, device)[:, None] - 1
    return index, start + torch.minimum(offset, last.clamp_min(0))


def wanted_rows(counts: list[int], width: int, last_only: bool, device: torch.device) -> Tensor | None:
    """Rows of a flattened [B * width] forward whose logits are wanted, int64 [R]; None for all of them."""
    if last_only:
        if width == 1:
            return None
        rows = [b * width + max(n, 1) - 1 for b, n in enumerate(counts)]
    elif all(n == width for n in counts):
        return None
    else:
        rows = [b * width + i for b, n in enumerate(counts) for i in range(n)]
    return on_device(rows, torch.int64, device)
