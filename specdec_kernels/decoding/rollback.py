"""Rolling back transformers' own caches after a verify forward, with a count per row."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from . import rollback_layers as _layers


class CacheRollback:
    """One verify step on a transformers cache at a time: remember, forward, take the rejected tokens back.

        step = CacheRollback(cache, model.config)
        step.begin(tokens.shape[1])
        mask = torch.cat((mask, torch.ones_like(tokens)), 1)
        positions = mask.cumsum(1)[:, -tokens.shape[1] :] - 1
        logits = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits  # cache= from 5.24
        mask = step.rollback(num_rejected, attention_mask=mask)

    After `rollback` the cache is what forwards over the kept text alone would have left, whatever was in the rejected
    tokens: sliding windows have the entries back that those had pushed out.

    Rows that reject different counts: a transformers cache has one length for the batch, so it is shortened by the least
    count, and the entries of a row that rejected more move to the right, behind new padding on their left. Keys carry
    their rotary positions, so the caller passes `position_ids` counted without padding and a 2-D `attention_mask`.

    A step widens the cache by the most that any row keeps. Given the mask, `rollback` drops the leading columns that are
    padding in every row: the cache is then as wide as its longest row, and a `StaticCache` needs room for that and for one
    forward. This is exact for all layers: windows go by distance, chunks are counted from each row's first token. (Llama
    4's attention temperature counts columns: with padding it is never that of the kept text alone.)

    Where layers have a sliding window, a verify forward feeds fewer tokens: num_draft + 1 < sliding_window.

    Recurrent and convolution states (linear attention, Mamba-2, LFM2) cannot be shortened: `rollback` puts them back as
    they were and calls `replay` for the kept tokens, unless none or all are rejected.

    Args:
        cache: a `DynamicCache` or `StaticCache` of full, sliding-window, linear attention layers or mixtures. One that
            makes its layers in the first forward is checked again in `begin` and `rollback`.
        config: the model's; required where the cache has recurrent layers, since some models' forward over several tokens
            does not continue from the cached state. It also tells whether a static cache is shorter than the window.

    Raises:
        UnsupportedModel: another cache class (encoder-decoder, offloading, a subclass), a layer class that is not known
            (quantised, indexed, a model's own), layers that record their past for transformers' own `crop`, or a recurrent
            model whose forward over several tokens is wrong or was not checked; the message names it.
        ValueError: no config for a cache with recurrent layers, or something else in its place.

    >>> import torch, transformers
    >>> cache = transformers.DynamicCache()
    >>> step = CacheRollback(cache)
    >>> step.begin()
    >>> entries = torch.arange(8.0).view(2, 1, 4, 1)
    >>> _ = cache.update(entries, entries, 0)  # what a forward over 4 tokens does
    >>> step.rollback([1, 3])
    tensor([0, 2])
    >>> cache.layers[0].keys.flatten()  # row 1: padding, padding, its entry
    tensor([0., 1., 2., 4., 5., 4.])
    """

    def __init__(self, cache, config=None) -> None:
        _layers.check_cache(cache)
        self.cache = cache
        if config is not None and not hasattr(config, "get_text_config"):
            _checks.fail("CacheRollback", "config", "the model's config (model.config)", f"a {type(config).__name__}")
        self._config = None if config is None else config.get_text_config(decoder=True)
        self._before: list[_layers.Before] | None = None
        self._num_tokens: int | None = None
        self._batch: int | None = None
        self._kinds()

    def _kinds(self) -> list[_layers.Kind]:
        return [_layers.check_layer(i, layer, self._config) for i, layer in enumerate(self.cache.layers)]

    @contextlib.contextmanager
    def _mode(self, kinds):
        """Tensors made in inference mode can be changed in it alone; others are left fit for autograd."""
        found = [t for layer, kind in zip(self.cache.layers, kinds, strict=True) for t in _layers.tensors(layer, kind)]
        with torch.no_grad(), torch.inference_mode(any(t.is_inference() for t in found)):
            yield

    def begin(self, num_tokens: int | None = None) -> None:
        """Remembers what the verify forward will overwrite or evict; call it right before that.

        States are copied, as are in-place windows (of those only `num_tokens` entries where that is given); of other
        windows the old tensors are held. Nothing is kept of full attention.

        Args:
            num_tokens: tokens per row that will be fed until `rollback`; required where no layer counts them (Mamba-2).
                Where it is given, the lengths of a `StaticCache` are waited for, to see whether that many fit.

        Raises UnsupportedModel as the constructor does, and ValueError for `num_tokens` below 1 or missing, or more than
        a static layer has room for or a sliding one stores. Then nothing has changed.
        """
        kinds = self._kinds()
        if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 1):
            _checks.fail("CacheRollback.begin", "num_tokens", ">= 1 or None", num_tokens)
        if num_tokens is None and kinds and not any(kind.attention for kind in kinds):
            raise ValueError("CacheRollback.begin: num_tokens is missing, and no layer of this cache counts tokens")
        if num_tokens is not None:
            _layers.check_room(self.cache.layers, kinds, self._config, num_tokens)
        with self._mode(kinds):
            self._before = [
                _layers.remember(layer, kind, num_tokens) for layer, kind in zip(self.cache.layers, kinds, strict=True)
            ]
        self._num_tokens, self._batch = num_tokens, self._shape(kinds)[1]

    def rollback(
        self,
        num_rejected: int | Sequence[int] | Tensor,
        *,
        attention_mask: Tensor | None = None,
        replay: Callable[[int, int], Any] | None = None,
    ) -> Tensor:
        """Drops the last num_rejected[b] of the tokens that row b was fed since `begin`, and padding that all rows share.

        Args:
            num_rejected: per row [B], or one number for all rows; 0 to the number of tokens fed. Counts in device memory
                are waited for, as are the lengths of a `StaticCache`.
            attention_mask: [B, L], any dtype, over all L tokens that the cache holds, those fed since `begin` too; 0 where
                padding. None: no padding is dropped. It is waited for, and not modified.
            replay: for recurrent layers, `replay(start, stop)` runs the model with this cache over tokens start..stop-1 of
                those fed since `begin`, of all rows, with the positions of the verify forward and its mask's first columns
                up to token stop. Attention layers have been taken back by then, so it adds their entries anew. It is called
                in order from 0, once for each different count of kept tokens but 0.

        Returns:
            Given `attention_mask`, the new mask: what `rollback_attention_mask` makes of it, less the leading columns that
            are 0 in every row. Its sums are the next positions. Without: int64 [B] on the cache's device, columns of
            padding that each row gained on its left.

        Raises:
            ValueError: counts out of range or of another length; a mask of another shape; `replay` missing where it is
                needed. Nothing has changed.
            RuntimeError: no `begin` before the forward; layers that took different numbers of tokens, or another number
                than `begin` was told; another number of rows than at `begin` (a reordering is not noticed); a sliding window that
                is smaller than the forward was long. Nothing has changed.
                `replay` fed another number of tokens than asked for; like any error out of `replay` it leaves the cache as
                it was at `begin`, unless it fed more tokens than `begin` was told.
        """
        if self._before is None:
            raise RuntimeError("CacheRollback.rollback: begin() must be called before the forward that is rolled back")
        kinds = self._kinds()
        layers = self.cache.layers
        # Layers that the forward has made were empty before it.
        before = self._before + [_layers.Before() for _ in kinds[len(self._before) :]]
        lengths = self._read_lengths(kinds, before)
        fed = self._fed(kinds, lengths)
        device, batch = self._shape(kinds)
        if self._batch not in (None, batch):
            raise RuntimeError(
                f"CacheRollback.rollback: the cache had {self._batch} rows at begin() and has {batch}: rows must stay, and keep "
                "their order, until they have been rolled back"
            )
        counts = _counts("CacheRollback.rollback", num_rejected, batch, fed)
        attention = [i for i, kind in enumerate(kinds) if kind.attention and layers[i].is_initialized]
        recurrent = [i for i, kind in enumerate(kinds) if kind.recurrent and _layers.states(layers[i])]
        trim = 0
        if attention_mask is not None:
            _check_mask(attention_mask, batch, fed, {lengths[i][1] for i in attention})
            attention_mask = rollback_attention_mask(attention_mask, num_rejected if batch is None else counts)
            trim = int((attention_mask == 0).all(0).cumprod(0).sum()) if counts else 0
        rejects = max(counts, default=0) > 0
        if rejects:
            for i in attention:
                _layers.check_window(i, layers[i], kinds[i], fed)
            if recurrent and replay is None and min(counts) < fed:
                raise ValueError(
                    "CacheRollback.rollback: replay is missing, and the state of "
                    f"{_layers.named(recurrent[0], layers[recurrent[0]])} cannot be shortened: the kept tokens must be fed again"
                )
        self._before = None
        old = {i: (before[i], lengths[i][0]) for i in {*attention, *recurrent}}
        if rejects and recurrent:
            self._restore(kinds, old, recurrent)
            self._replay(kinds, old, attention, recurrent, [fed - n for n in counts], replay, trim)
        elif rejects or trim:
            self._take_back(kinds, old, attention, fed, counts, trim)
        if attention_mask is not None:
            return attention_mask[:, trim:].contiguous()
        least = min(counts, default=0)
        return torch.tensor([n - least for n in counts], dtype=torch.int64, device=device)

    def _read_lengths(self, kinds, before) -> list[tuple[int, int]]:
        """Each layer's length at `begin` and now, with one wait for the device at most."""
        pairs = [
            (old.length, _layers.length(layer, kind) if kind.attention else 0)
            for layer, kind, old in zip(self.cache.layers, kinds, before, strict=True)
        ]
        values = _layers.read(n for pair in pairs for n in pair)
        return list(zip(values[::2], values[1::2], strict=True))

    def _fed(self, kinds, lengths: list[tuple[int, int]]) -> int:
        """Tokens per row that every counting layer took since `begin`."""
        layers = self.cache.layers
        fed: dict[int, int] = {}
        for i, (old, now) in enumerate(lengths):
            if kinds[i].attention and layers[i].is_initialized:
                fed.setdefault(now - old, i)
        if self._num_tokens is not None and not fed:
            return self._num_tokens
        told = set(fed) if self._num_tokens is None else {self._num_tokens, *fed}
        if len(told) > 1 or min(told, default=0) < 0:
            took = ", ".join(f"{_layers.named(i, layers[i])} took {n} tokens" for n, i in fed.items())
            expected = "" if self._num_tokens is None else f", begin() was told {self._num_tokens}"
            raise RuntimeError(f"CacheRollback.rollback: since begin() {took}{expected}")
        return min(told, default=0)

    def _shape(self, kinds) -> tuple[torch.device, int | None]:
        for layer, kind in zip(self.cache.layers, kinds, strict=True):
            for t in _layers.tensors(layer, kind):
                return t.device, t.shape[0]
        return torch.device("cpu"), None

    def _take_back(self, kinds, old, attention, fed: int, counts: list[int], trim: int) -> None:
        with self._mode(kinds):
            dropped = _layers.Counts(counts)
            for i in attention:
                before, length = old[i]
                _layers.take_back(self.cache.layers[i], kinds[i], length, before.oldest, fed, dropped, trim)

    def _restore(self, kinds, old, recurrent) -> None:
        """Every layer as it was at `begin`, however far a forward since then has come."""
        with self._mode(kinds):
            for i, (before, length) in old.items():
                layer = self.cache.layers[i]
                if kinds[i].attention and layer.is_initialized:
                    fed = int(_layers.length(layer, kinds[i])) - length
                    if fed > 0:
                        _layers.take_back(layer, kinds[i], length, before.oldest, fed, _layers.Counts([fed]))
                if i in recurrent:
                    _layers.restore_states(layer, before)

    def _replay(self, kinds, old, attention, recurrent, kept: list[int], replay, trim: int) -> None:
        """From the state at `begin`: feeds the kept tokens again, and keeps each row's states behind its last one."""
        layers = self.cache.layers
        states = [state for i in recurrent for state in _layers.states(layers[i])]
        stops = sorted(set(kept))
        pieces: list[tuple[Tensor, list[Tensor]]] = []
        start = 0
        try:
            for stop in stops:
                if stop > start:
                    replay(start, stop)
                    for i in attention:
                        took = int(_layers.length(layers[i], kinds[i])) - old[i][1]
                        if took != stop:
                            raise RuntimeError(
                                f"CacheRollback.rollback: replay({start}, {stop}) must feed {stop - start} tokens, but "
                                f"{_layers.named(i, layers[i])} took {took - start}"
                            )
                if stop < stops[-1]:
                    rows = [b for b, n in enumerate(kept) if n == stop]
                    index = torch.tensor(rows, dtype=torch.int64, device=states[0].device)
                    with self._mode(kinds):
                        pieces.append((index, [state.index_select(0, index.to(state.device)) for state in states]))
                start = stop
        except BaseException:
            self._restore(kinds, old, recurrent)
            raise
        with self._mode(kinds):
            for index, saved in pieces:
                for state, piece in zip(states, saved, strict=True):
                    state.index_copy_(0, index.to(state.device), piece)
        self._take_back(kinds, old, attention, stops[-1], [stops[-1] - n for n in kept], trim)


def rollback_attention_mask(attention_mask: Tensor, num_rejected: int | Sequence[int] | Tensor) -> Tensor:
    """The 2-D attention mask of a cache after `CacheRollback.rollback` with the same counts and without a mask.

    Args:
        attention_mask: [B, L], any dtype, over all tokens that the cache held after the verify forward; 0 where padding.
        num_rejected: as in `rollback`, 0 to L per row.

    Returns [B, L - min(num_rejected)]: row b's last num_rejected[b] columns are dropped, the rest is aligned to the right
    behind zeros. Its sums are the next positions. Raises ValueError for arguments of another shape or range.

    >>> rollback_attention_mask(torch.ones(2, 4, dtype=torch.int64), [1, 3])
    tensor([[1, 1, 1],
            [0, 0, 1]])
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        _checks.fail("rollback_attention_mask", "attention_mask", "a tensor [B, L]", attention_mask)
    batch, length = attention_mask.shape
    counts = _counts("rollback_attention_mask", num_rejected, batch, length)
    least = min(counts, default=0)
    device = attention_mask.device
    shift = torch.tensor([n - least for n in counts], dtype=torch.int64, device=device)
    column = torch.arange(length - least, device=device) - shift[:, None]
    return attention_mask.gather(1, column.clamp(min=0)).masked_fill_(column < 0, 0)


def _check_mask(mask, batch: int | None, fed: int, lengths: set[int]) -> None:
    """batch, lengths: None and empty where the cache does not know."""
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 2
        or (batch is not None and mask.shape[0] != batch)
        or mask.shape[1] < fed
        or not lengths <= {mask.shape[1]}
    ):
        shape = f"[{'B' if batch is None else batch}, {min(lengths) if lengths else 'L'}]"
        must = f"a tensor {shape} over all tokens in the cache, the {fed} since begin() included"
        _checks.fail("CacheRollback.rollback", "attention_mask", must, mask)


def _counts(op: str, num_rejected, batch: int | None, most: int) -> list[int]:
    """`num_rejected` on the host, one per row. batch: None where the cache is empty still."""
    values = num_rejected
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.dtype == torch.bool or values.dim() > 1:
            _checks.fail(op, "num_rejected", "an int, or ints [B]", values)
        values = values.tolist()
    try:
        if not isinstance(values, Sequence):
            values = [operator.index(values)] * (1 if batch is None else batch)
        values = [operator.index(n) for n in values]
    except TypeError:
        _checks.fail(op, "num_rejected", "an int, or ints [B]", num_rejected)
    if batch is not None and len(values) != batch:
        _checks.fail(op, "num_rejected", f"of B={batch} rows", f"{len(values)}")
    for row, n in enumerate(values):
        if not 0 <= n <= most:
            _checks.fail(op, f"num_rejected[{row}]", f"in [0, {most}], the tokens that can be dropped", f"{n}")
    return values
