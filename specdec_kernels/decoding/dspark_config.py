"""What a DSpark checkpoint's config.json says, in one place: the keys that engines read, their precedence and their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import Qwen3Config

ARCHITECTURE = "Qwen3DSparkModel"
_SLIDING = "sliding_attention"
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
#: Keys of the backbone that are written; the rest of a `Qwen3Config` are defaults or no part of a drafter.
_BACKBONE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings", "vocab_size", "initializer_range", "layer_types",
)  # fmt: skip


def _fail(key: str, must: str, got: Any) -> None:
    raise ValueError(f"DSpark config: {key} must be {must}, got {got!r}")


def _int(key: str, value: Any, low: int, high: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        _fail(key, f"an int >= {low}" if high is None else f"an int in [{low}, {high}]", value)
    return value


class _Keys:
    """A key of config.json, or of its `dflash_config` or `eagle_config`, which come first, as engines look it up."""

    def __init__(self, raw: Mapping[str, Any]):
        sections = [raw.get(name) for name in ("dflash_config", "eagle_config")]
        self.places = [s for s in sections if isinstance(s, Mapping)] + [raw]

    def __call__(self, name: str, default: Any = None) -> Any:
        return next((place[name] for place in self.places if place.get(name) is not None), default)


@dataclass(frozen=True)
class DSparkConfig:
    """Shape and meaning of a DSpark drafter with a Qwen3 backbone.

    backbone: `Qwen3Config` of the draft layers; its `vocab_size` is that of the ids the drafter reads: the target's.
    block_size: drafts of a block, which has as many slots: the anchor (the text's last token) and block_size - 1 masks, each of
        which predicts the token behind it.
    mask_token_id: id whose embedding the masks have.
    target_layer_ids: target layers (0 for the first) whose outputs, side by side, are the context.
    target_hidden_size: width of each of them.
    markov_rank: r of the bias W1[x_{k-1}] W2.
    draft_vocab_size: columns of the drafter's logits; below the target's vocabulary `d2t` says which ids they are.
    enable_confidence_head, confidence_head_with_markov: c_k = sigmoid(w · [h_k; W1[x_{k-1}]] + b), without the second part if
        not `with_markov`.
    windows: tokens that each layer reads to either side, its own included, 0 for all.
    causal: whether a slot reads only slots before it and its own; the context is before all of them.
    logit_scale: factor of logits and bias.
    num_target_layers: layers of the target it was trained for, or None where the file does not say.
    """

    backbone: Any
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    markov_rank: int
    draft_vocab_size: int
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    windows: tuple[int, ...] = field(default=())
    causal: tuple[bool, ...] = field(default=())
    logit_scale: float = 1.0
    num_target_layers: int | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DSparkConfig:
        """Reads a parsed config.json.

        Raises ValueError naming the key where it is missing, out of range, or asks for something that is not supported.
        """
        _check_kind(raw)
        keys = _Keys(raw)
        try:
            backbone = Qwen3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "auto_map", "dtype")})
        except Exception as error:  # strict dataclasses have errors of their own
            raise ValueError(f"DSpark config: not a Qwen3 config: {error}") from error
        # Block and context are masked explicitly; paged and flash implementations of the target's are not meant here.
        backbone._attn_implementation = "sdpa"
        heads = _int("num_attention_heads", backbone.num_attention_heads, 1)
        if heads % _int("num_key_value_heads", backbone.num_key_value_heads, 1):
            _fail("num_key_value_heads", f"a divisor of the {heads} heads", backbone.num_key_value_heads)
        vocab = _int("vocab_size", backbone.vocab_size, 1)
        mask = next((v for v in (keys(name) for name in _MASK_KEYS) if v is not None), None)
        layers, (windows, causal) = _target_layers(raw), _attention(raw, keys, backbone)
        confidence = bool(keys("enable_confidence_head", False))
        scale = keys("logit_scale", 1.0)
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < float("inf"):
            _fail("logit_scale", "a number > 0", scale)
        given = keys("num_target_layers")
        return cls(
            backbone=backbone,
            block_size=_int("block_size", keys("block_size", keys("dspark_block_size")), 1, 128),
            mask_token_id=_int("mask_token_id", mask, 0, vocab - 1),
            target_layer_ids=layers,
            target_hidden_size=_int("target_hidden_size", keys("target_hidden_size", backbone.hidden_size), 1),
            markov_rank=_int("markov_rank", keys("markov_rank"), 1),
            draft_vocab_size=_int("draft_vocab_size", keys("draft_vocab_size", vocab), 1),
            enable_confidence_head=confidence,
            confidence_head_with_markov=confidence and bool(keys("confidence_head_with_markov", False)),
            windows=windows,
            causal=causal,
            logit_scale=float(scale),
            num_target_layers=None if given is None else _int("num_target_layers", given, 1),
        )

    @classmethod
    def for_target(
        cls, target, *, mask_token_id: int, num_layers: int = 1, block_size: int = 7, markov_rank: int = 64,
        target_layer_ids: Sequence[int] | None = None, draft_vocab_size: int | None = None, **keys,
    ) -> DSparkConfig:  # fmt: skip
        """A new drafter for `target`, with its sizes.

        target_layer_ids: None: five of them or fewer, evenly from the second to the third last. keys: any further ones of
        config.json, which override what the target has.
        """
        config = target.config.get_text_config()
        count = config.num_hidden_layers
        if target_layer_ids is None:
            first = min(1, count - 1)
            last = max(count - 3, first)
            taken = min(5, last - first + 1)
            target_layer_ids = [first + round(i * (last - first) / max(taken - 1, 1)) for i in range(taken)]
        raw = {
            "architectures": [ARCHITECTURE], "model_type": "qwen3", "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size, "num_hidden_layers": num_layers,
            "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6), "vocab_size": target.get_input_embeddings().weight.shape[0],
            "max_position_embeddings": config.max_position_embeddings, "rope_theta": _theta(config),
            "block_size": block_size, "mask_token_id": mask_token_id, "markov_rank": markov_rank,
            "target_layer_ids": list(target_layer_ids), "num_target_layers": count, "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": config.hidden_size, "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip
        return cls.from_dict(raw | keys)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this drafter, flat, as `from_dict` and engines read it."""
        backbone = self.backbone
        rope = {k: v for k, v in backbone.rope_parameters.items() if k not in ("rope_theta", "type")}
        sliding = any(self.windows)
        raw: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "qwen3"}
        raw |= {name: getattr(backbone, name) for name in _BACKBONE_KEYS}
        raw |= {
            "rope_theta": _theta(backbone),
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "sliding_window": max(self.windows) if sliding else None,
            "use_sliding_window": sliding,
            "layer_types": [_SLIDING if w else "full_attention" for w in self.windows],
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "target_hidden_size": self.target_hidden_size,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "draft_vocab_size": self.draft_vocab_size,
            "logit_scale": self.logit_scale,
            "sample_from_anchor": True,
        }
        # Without the key a layer is causal where it is of the sliding kind.
        if list(self.causal) != [bool(w) for w in self.windows]:
            raw["is_causal"] = self.causal[0]
        if self.num_target_layers is not None:
            raw["num_target_layers"] = self.num_target_layers
        return raw


def _check_kind(raw: Mapping[str, Any]) -> None:
    """Refuses by name what is another format, or a part that this package does not have."""
    keys = _Keys(raw)
    if raw.get("speculators_model_type") is not None:
        _fail("speculators_model_type", "absent (the speculators format has another block layout)",
              raw["speculators_model_type"])  # fmt: skip
    names = raw.get("architectures")
    known = isinstance(names, list) and (
        ARCHITECTURE in names or ("DSparkDraftModel" in names and raw.get("model_type") == "qwen3")
    )
    if not known:
        _fail("architectures", f"[{ARCHITECTURE!r}], or ['DSparkDraftModel'] with model_type 'qwen3'", names)
    if raw.get("model_type", "qwen3") != "qwen3":
        _fail("model_type", "'qwen3'", raw["model_type"])
    for name, must, wanted in (
        ("quantization_config", "absent (quantised drafters are not supported)", None),
        ("markov_head_type", "'vanilla'", "vanilla"),
        ("use_aux_hidden_state", "true", True),
        ("sample_from_anchor", "true (the anchor predicts the first draft)", True),
        ("dspark_bonus_anchor", "false", False),
        ("is_neox_style", "true", True),
        ("attention_sink_bias", "false", False),
        ("add_swa_attention_sink_bias", "false", False),
        ("attention_value_scale", "absent", None),
        ("mrope_section", "absent", None),
    ):
        value = keys(name)
        if value is not None and value != wanted:
            _fail(name, must, value)
    ropes = [raw[name] for name in ("rope_parameters", "rope_scaling") if isinstance(raw.get(name), Mapping)]
    for rope in ropes:
        if "mrope_section" in rope:
            _fail("mrope_section", "absent", rope["mrope_section"])
    theta = next((place["rope_theta"] for place in (*ropes, raw) if place.get("rope_theta") is not None), None)
    # Engines and transformers have different defaults; a wrong one only shows as drafts that are not accepted.
    if not isinstance(theta, (int, float)) or not theta > 0:
        _fail("rope_theta", "a number > 0", theta)


def _target_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Target layers, 0 for the first. The two "aux" keys count what enters a layer, so theirs are one more."""
    dflash, eagle = (raw.get(name) or {} for name in ("dflash_config", "eagle_config"))
    for key, value, shift in (
        ("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"), 1),
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids"), 0),
        ("dspark_target_layer_ids", raw.get("dspark_target_layer_ids"), 0),
        ("target_layer_ids", raw.get("target_layer_ids"), 0),
        ("dflash_config.layer_ids", dflash.get("layer_ids"), 1),
        ("eagle_config.layer_ids", eagle.get("layer_ids"), 1),
    ):
        if not value:
            continue
        ok = isinstance(value, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        # Engines collect the states in the order of the layers, whatever that of the list is.
        if not ok or list(value) != sorted(set(value)) or value[0] < shift:
            _fail(key, f"layers >= {shift}, each larger than the one before", value)
        return tuple(i - shift for i in value)
    _fail("target_layer_ids", "a list of target layers", raw.get("target_layer_ids"))
    raise AssertionError


def _attention(raw: Mapping[str, Any], keys: _Keys, backbone) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window (0: none) and causality of each layer."""
    kinds, count = backbone.layer_types, backbone.num_hidden_layers
    if len(kinds) != count or not set(kinds) <= {_SLIDING, "full_attention"}:
        _fail("layer_types", f'{count} of "full_attention" and "{_SLIDING}"', kinds)
    causal = raw.get("is_causal")
    if causal is None:
        causal = keys("causal")
    resolved = tuple(kind == _SLIDING if causal is None else bool(causal) for kind in kinds)
    if keys("use_swa", False) and _SLIDING not in kinds:
        kinds = [_SLIDING] * count
    window = 0
    if _SLIDING in kinds:
        window = _int("sliding_window", keys("swa_window_size", raw.get("sliding_window")), 1)
    return tuple(window if kind == _SLIDING else 0 for kind in kinds), resolved


def _theta(config) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", None) or 1e6))
