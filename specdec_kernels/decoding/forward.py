"""One forward of a causal LM over a `RowCache`: the new tokens of every row in, logits of the wanted rows out."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import paged_attention
from .cache import RowCache
from .caches import new_cache
from .masks import Masks, TreeShape, row_positions, wanted_rows
from .support import UnsupportedModel, check_supported

_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model) -> threading.RLock:
    """The lock that everything in this package which puts hooks on `model`, or looks for them, takes."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


class ForwardOutput(NamedTuple):
    """`logits` [R, V] of the wanted rows, request-major · `taps` [sum(counts), T * H], the states that were asked for of every
    token, request-major, or None."""

    logits: Tensor
    taps: Tensor | None


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
        self.masks = Masks(kinds, window)
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
        if self._reads_pages and kind != "paged":
            raise ValueError(f'attention implementation "{paged_attention.NAME}" needs cache="paged", got {kind!r}')
        return new_cache(
            self.config,
            batch_size,
            kind,
            gather=not self._reads_pages,
            capacity=capacity,
            device=self.device,
            **options,
        )

    def refresh(self) -> None:
        """Takes in what has changed about the model since the last call; decoders call it once per `generate`."""

    def check_taps(self, owner: str, taps: Sequence[int]) -> None:
        """Raises ValueError unless the model has the layers whose states are asked for."""
        count = self.config.num_hidden_layers
        for tap in taps:
            if not isinstance(tap, int) or not -1 <= tap < count:
                raise ValueError(f"{owner}: taps must be layers of the target, -1 to {count - 1}, got {tap!r}")
        if -1 in taps and self._head is None:
            raise UnsupportedModel(f"{type(self.model).__name__}: has no LM head that reads the last hidden state")

    def __call__(
        self, tokens: Tensor, counts: list[int], cache: RowCache, *, last_only: bool = False,
        tree: TreeShape | None = None, taps: Sequence[int] = (),
    ) -> ForwardOutput:  # fmt: skip
        """Feeds counts[b] tokens of row b; the cache's lengths are left for the caller to advance.

        Args:
            tokens: int64 [B, q], row b's tokens first, then padding of any valid id.
            counts: tokens per row, 0 <= counts[b] <= q; a row without any gives no logits, or with `last_only` some that mean
                nothing.
            cache: the rows' cache.
            last_only: logits of each row's last token alone ([B, V]) instead of all sum(counts) of them.
            tree: who follows whom among the tokens; None: each follows the one before it.
            taps: layers whose output states are wanted, 0 for the first; -1 for what the LM head reads.
        """
        if self.config._attn_implementation != self._implementation:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: attention implementation was {self._implementation!r} when this forward was made "
                f"and is {self.config._attn_implementation!r} now; make a new decoder"
            )
        if tree is not None and self._reads_pages:
            raise UnsupportedModel(
                f'attention implementation "{paged_attention.NAME}" takes chains, got a tree of drafts'
            )
        width, device = tokens.shape[1], tokens.device
        cache.reserve(counts, width)
        rows = wanted_rows(counts, width, last_only, device)
        index, positions = row_positions(cache, counts, width, device, tree)
        pages = cache.forward_of(counts, width, self._windows)
        mask = self.masks(cache, index, positions, self.model.dtype, tree) if pages is None else None
        states: dict[int, Tensor] = {}
        gathered = False
        caller = threading.get_ident()

        def gather(_module, args):
            nonlocal gathered
            # The caller's own use of the model in another thread takes no lock.
            if threading.get_ident() != caller:
                return None
            hidden = args[0].reshape(-1, args[0].shape[-1])
            states[-1] = hidden
            hidden = hidden if rows is None else hidden.index_select(0, rows)
            gathered = True
            return (hidden[None], *args[1:])

        def keep(layer: int):
            def hook(_module, _args, output):
                if threading.get_ident() == caller:
                    output = output[0] if isinstance(output, tuple) else output
                    states[layer] = output.reshape(-1, output.shape[-1])

            return hook

        # Gathering before the LM head spares the logits of padding, and keeps whatever the model does after the head.
        with model_lock(self.model), paged_attention.Serving(pages), contextlib.ExitStack() as hooks:
            if self._head is not None:
                hooks.callback(self._head.register_forward_pre_hook(gather).remove)
            layers = self.model.get_decoder().layers if any(tap >= 0 for tap in taps) else None
            for tap in {tap for tap in taps if tap >= 0}:
                hooks.callback(layers[tap].register_forward_hook(keep(tap)).remove)
            logits = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **{self._cache_argument: cache},
            ).logits
        logits = logits.reshape(-1, logits.shape[-1])
        if not gathered and rows is not None:
            logits = logits.index_select(0, rows)
        return ForwardOutput(logits, join_taps(states, taps, wanted_rows(counts, width, False, device)))


def join_taps(states: dict[int, Tensor], taps: Sequence[int], rows: Tensor | None) -> Tensor | None:
    """The states of `rows` (None: of all), side by side in the order of `taps`; None without any."""
    if not taps:
        return None
    joined = torch.cat([states[tap] for tap in taps], -1) if len(taps) > 1 else states[taps[0]]
    return joined if rows is None else joined.index_select(0, rows)
