"""Which transformers models a cache with a length per row can serve."""

from __future__ import annotations

_ATTENTION = ("full_attention", "sliding_attention")
# Recurrent models whose configs do not list their layers' types.
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm", "jamba", "bamba", "zamba")


class UnsupportedModel(ValueError):
    """The model keeps state that a per-row length cannot roll back, or reads positions that it cannot be given."""


def check_supported(config) -> None:
    """Raises UnsupportedModel, naming the reason, for models that a `RowCache` cannot serve.

    Supported: decoder-only models whose layers are all full or sliding-window attention with explicit positions, as far
    as the config tells; `ModelForward` also refuses models whose `forward` takes no `position_ids`.
    """
    name = getattr(config, "model_type", None) or type(config).__name__

    def refuse(reason: str):
        raise UnsupportedModel(f"decoding: model type {name!r} is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("encoder-decoder models keep a cross-attention cache")
    if getattr(config, "alibi", False) or name in ("bloom", "mpt"):
        refuse("ALiBi takes positions from the cache's scalar length, not from position_ids")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(_ATTENTION))
    if kinds:
        refuse(f"layers of type {', '.join(kinds)} (only {' and '.join(_ATTENTION)} can be rolled back by length)")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention")
    if name == "gpt_neo" or "local" in (getattr(config, "attention_layers", None) or ()):
        refuse("local attention takes its window from the number of keys, not from position_ids")
    if name == "dory":
        refuse("its loops append their own keys behind the last entry of the whole batch")
    if name in _RECURRENT:
        refuse("recurrent state cannot be rolled back by length")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers that share another layer's keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("bidirectional attention")
    if getattr(config, "cache_implementation", None) == "quantized":
        refuse("a quantised cache")
