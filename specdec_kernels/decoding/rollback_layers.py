"""The layers of transformers' caches: which of them can be rolled back, and how one is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import cache_utils

from .. import _checks
from .support import UnsupportedModel


class Kind(NamedTuple):
    """What a layer class keeps: attention entries, all or those of a window; in place or not; recurrent states."""

    attention: bool = False
    sliding: bool = False
    static: bool = False
    recurrent: bool = False


# Exact classes: a subclass may keep state that nothing here knows of.
_KINDS: dict[type, Kind] = {
    getattr(cache_utils, name): kind
    for name, kind in {
        "DynamicLayer": Kind(attention=True),
        "DynamicSlidingWindowLayer": Kind(attention=True, sliding=True),
        "StaticLayer": Kind(attention=True, static=True),
        "StaticSlidingWindowLayer": Kind(attention=True, sliding=True, static=True),
        "LinearAttentionLayer": Kind(recurrent=True),
        "LinearAttentionAndFullAttentionLayer": Kind(attention=True, recurrent=True),
        "LinearAttentionAndSlidingWindowAttentionLayer": Kind(attention=True, sliding=True, recurrent=True),
        "LinearAttentionAndStaticFullAttentionLayer": Kind(attention=True, static=True, recurrent=True),
        "LinearAttentionAndStaticSlidingWindowAttentionLayer": Kind(True, True, True, True),
        "DummyLayer": Kind(),
    }.items()
    if hasattr(cache_utils, name)
}
_CACHES = (cache_utils.Cache, cache_utils.DynamicCache, cache_utils.StaticCache)
# Models with recurrent layers whose forward over several tokens continues from the cached state, on 5.17, 5.19 and 5.24.
_CONTINUES = (
    "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
_RESTARTS = ("falcon_mamba", "jamba", "mamba", "zamba")
_CLAMPS = ("nemotron_h", "zamba2")


def refuse(what: str, reason: str) -> NoReturn:
    raise UnsupportedModel(f"CacheRollback: {what} is not supported: {reason}")


def named(index: int, layer) -> str:
    return f"layer {index} ({type(layer).__name__})"


def check_cache(cache) -> None:
    """Raises UnsupportedModel for a cache class that is not known to keep all it has in its layers."""
    name = type(cache).__name__
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        refuse(name, "a cross-attention cache has no text of its own to roll back")
    if type(cache) not in _CACHES:
        refuse(name, f"only {', '.join(c.__name__ for c in _CACHES)} themselves, not subclasses")
    if getattr(cache, "offloading", False):
        refuse(f"an offloading {name}", "its layers move between devices while they are changed")


def check_layer(index: int, layer, config) -> Kind:
    """The kind of a layer. Raises UnsupportedModel, naming the layer, where it cannot be rolled back."""
    kind = _KINDS.get(type(layer))
    where = named(index, layer)
    if kind is None:
        known = ("Quantized", "quantised entries cannot be shifted"), ("Indexed", "its indexer keeps keys of its own")
        refuse(where, next((text for part, text in known if part in where), "an unknown class may keep other state"))
    if getattr(layer, "record_past", False):
        refuse(where, "it records its past for transformers' own crop(), which changes what it stores")
    if kind.sliding and window(layer, kind) < 1:
        refuse(where, "a window of 1 token")
    if kind.recurrent:
        check_recurrent(where, config)
    return kind


def check_recurrent(where: str, config) -> None:
    """Raises UnsupportedModel unless the model's forward over several tokens is known to continue from a cached state."""
    if config is None:
        raise ValueError(
            f"CacheRollback: config must be the model's config, got None: {where} keeps a recurrent state, and some "
            "models' forward over several tokens does not continue from it"
        )
    model = config.model_type
    what = f"{where} of model type {model!r}"
    if model in _RESTARTS:
        refuse(what, "its forward over several tokens starts from an empty state, so the verify logits are wrong")
    if model in _CLAMPS:
        refuse(what, "its forward over one token does not clamp the time step as that over several tokens does")
    if model not in _CONTINUES:
        refuse(what, "not checked whether its forward over several tokens continues from the cached state")
    limit = getattr(config, "time_step_limit", None)
    if limit is not None and tuple(limit) != (0.0, float("inf")):
        refuse(what, f"time_step_limit {tuple(limit)} is applied to several tokens, not to one")


def window(layer, kind: Kind) -> int:
    """Entries that a sliding layer stores: its window, less the next token where the forward concatenates."""
    return layer.max_cache_len if kind.static else layer.sliding_window - 1


def length(layer, kind: Kind) -> int | Tensor:
    """Tokens that an attention layer has taken; of a full static one its own counter, on the device."""
    if not layer.is_initialized:
        return 0
    if kind.sliding:
        return layer.cumulative_length_int if kind.static else layer.cumulative_length
    if kind.static:
        return layer.cumulative_length
    return layer.keys.shape[-2] if layer.keys.numel() else 0


def read(lengths: Iterable[int | Tensor]) -> list[int]:
    """Lengths on the host, with one wait for the device at most."""
    lengths = list(lengths)
    counters = [n for n in lengths if isinstance(n, Tensor)]
    values = iter(torch.stack([n.to(counters[0].device) for n in counters]).tolist() if counters else ())
    return [next(values) if isinstance(n, Tensor) else n for n in lengths]


def tensors(layer, kind: Kind) -> list[Tensor]:
    found = [layer.keys, layer.values] if kind.attention and layer.is_initialized else []
    return found + (states(layer) if kind.recurrent else [])


def states(layer) -> list[Tensor]:
    both = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in both if state is not None]


@dataclasses.dataclass
class Before:
    """A layer as it was before the verify forward: its length, the entries that may be evicted, its states."""

    length: Any = 0
    oldest: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    states: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)
    has_previous_state: dict[int, bool] = dataclasses.field(default_factory=dict)


def remember(layer, kind: Kind, num_tokens: int | None) -> Before:
    """What `take_back` and `restore_states` need. num_tokens: what the forward will feed; None: not known."""
    before = Before()
    if kind.attention:
        now = length(layer, kind)
        # A static layer hands out the counter itself, which the forward raises in place.
        before.length = now.clone() if isinstance(now, Tensor) else now
    if kind.sliding and layer.is_initialized:
        most = min(before.length, window(layer, kind), before.length if num_tokens is None else num_tokens)
        for name in ("keys", "values"):
            entries = getattr(layer, name)
            # A static layer is written in place; the others' forward concatenates into new tensors.
            before.oldest[name] = entries[:, :, :most].clone() if kind.static else entries
    if kind.recurrent:
        before.has_previous_state = dict(layer.has_previous_state)
        for name in ("conv_states", "recurrent_states"):
            # Cloned: a forward over one token writes in place.
            found = getattr(layer, name).items()
            before.states |= {(name, i): state.clone() for i, state in found if state is not None}
    return before


def check_room(layers, kinds: Sequence[Kind], config, num_tokens: int) -> None:
    """Raises ValueError where a forward over num_tokens would not fit a static layer, or is more than a sliding one stores."""
    model_window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0
    # A static cache shorter than the model's window makes a window of its own length: past that it forgets in silence.
    full = [
        i
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
        if kind.static and not (kind.sliding and layer.max_cache_len >= model_window)
    ]
    room = {i: window(layers[i], kind) for i, kind in enumerate(kinds) if kind.sliding}
    used = read(length(layers[i], kinds[i]) for i in full)
    room |= {i: max(layers[i].max_cache_len - n, 0) for i, n in zip(full, used, strict=True)}
    for i, most in room.items():
        if num_tokens > most:
            stores = f"stores {most} entries, and the tokens to be rejected must be among them"
            why = f"has room for {most} more tokens" if i in full else stores
            _checks.fail(
                "CacheRollback.begin", "num_tokens", f"at most {most}: {named(i, layers[i])} {why}", f"{num_tokens}"
            )


def check_window(index: int, layer, kind: Kind, fed: int) -> None:
    """Raises RuntimeError where a sliding layer never stored all tokens of the last forward."""
    if kind.sliding and fed > window(layer, kind):
        raise RuntimeError(
            f"CacheRollback.rollback: {named(index, layer)} stores {window(layer, kind)} entries and took {fed} tokens "
            "since begin(); the first of them are gone. Verify fewer tokens in one forward"
        )


class Counts:
    """Tokens to drop per row, and the rows of each count as a tensor, made once for all layers of a device."""

    def __init__(self, counts: Sequence[int]):
        self.least, self.most = min(counts), max(counts)
        self.more = sorted({n for n in counts if n > self.least})
        self._counts = counts
        self._rows: dict[tuple[int, torch.device], Tensor] = {}

    def rows(self, count: int, device: torch.device) -> Tensor:
        if (count, device) not in self._rows:
            rows = [b for b, n in enumerate(self._counts) if n == count]
            self._rows[count, device] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._rows[count, device]


def take_back(
    layer, kind: Kind, before: int, oldest: dict[str, Tensor], fed: int, counts: Counts, trim: int = 0
) -> None:
    """Drops each row's last tokens of the `fed` ones, as many as `counts` says, and aligns the rows to the right again.

    before, oldest: the layer's length and `Before.oldest`. trim: leading columns that go too. A row that drops more than
    the others gets padding in front, which keeps whatever finite entries stood there: it is masked.
    """
    least = counts.least
    if (counts.most == 0 and trim == 0) or not layer.is_initialized:
        return
    new_length = before + fed - least - trim
    limit = window(layer, kind) if kind.sliding else before + fed
    stored, kept, keep = min(before, limit), min(before + fed, limit), min(new_length, limit)
    # Where no row drops a token, what was pushed out is not needed, and a long forward has pushed out more than is known.
    evicted = stored + fed - kept if counts.most else 0
    start = evicted + kept - least - keep
    groups = []
    for count in counts.more:
        shift = count - least
        pad = max(shift - start, 0)
        groups.append((counts.rows(count, layer.keys.device), start + pad - shift, pad))
    for name in ("keys", "values"):
        buffer = getattr(layer, name)
        history = buffer.narrow(2, 0, kept)
        if evicted:
            history = torch.cat((oldest[name][:, :, :evicted], history), dim=2)
        new = history.narrow(2, start, keep)
        if kind.static and start > 0 and not evicted:
            new = new.clone()  # it overlaps the place that it goes to
        # In place, which the forward's own concatenation allows: no one else holds its result. Rows that move equally far
        # move at once: few launches, and the copies are of contiguous entries.
        for row, first, pad in groups:
            moved = history.narrow(2, first, keep - pad).index_select(0, row)
            new.narrow(2, pad, keep - pad).index_copy_(0, row, moved)
        if not kind.static:
            setattr(layer, name, new)
        elif evicted or start > 0:
            # In place: compiled code and CUDA graphs hold the buffer's address.
            buffer.narrow(2, 0, keep).copy_(new)
    if kind.static:
        # A sliding layer stops counting here once its window is full.
        layer.cumulative_length.fill_(keep if kind.sliding else new_length)
    if kind.sliding:
        setattr(layer, "cumulative_length_int" if kind.static else "cumulative_length", new_length)


def restore_states(layer, before: Before) -> None:
    """Recurrent and convolution states as they were, in place; those that did not exist are emptied."""
    for name in ("conv_states", "recurrent_states"):
        for i, state in getattr(layer, name).items():
            if state is not None:
                saved = before.states.get((name, i))
                state.zero_() if saved is None else state.copy_(saved)
    for i in layer.has_previous_state:
        layer.has_previous_state[i] = before.has_previous_state.get(i, False)
