"""Sampling parameters of a batch, and the ragged layout of its drafts."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks

_MASK = (1 << 64) - 1
#: Temperatures below this are greedy: 1e-5 as float32, which temperatures are.
GREEDY_BELOW = float(torch.tensor(1e-5))
_FLOAT32_MAX = torch.finfo(torch.float32).max


def _spread(seed: int, row: int) -> int:
    """splitmix64 of (seed, row) as a signed 64-bit integer, so that equal prompts in one batch differ."""
    x = (seed + (row + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def _signed64(seed: int) -> int:
    seed &= _MASK
    return seed - (1 << 64) if seed >> 63 else seed


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """Sampling parameters on the device, one element per request.

    | field | dtype | shape | meaning |
    |---|---|---|---|
    | `temperature` | float32 | [B] | finite, >= 0; below 1e-5 is greedy |
    | `top_p` | float32 | [B] | >= 1 off; <= 0 keeps the maxima |
    | `top_k` | int32 | [B] | <= 0 or >= V off |
    | `min_p` | float32 | [B] | relative to the row's maximum; <= 0 off; >= 1 keeps the maxima |
    | `seed` | int64 | [B] | any 64-bit value |
    | `slots` | int32/int64 | [B] or None | request b reads element `slots[b]` of the other fields, which are then [S]: an engine's state table is used in place |

    Build it with `create` from scalars, lists or tensors.

    >>> SamplingTensors.create(temperature=[0.8, 0.0], top_p=0.9, seed=[1, 2]).top_p
    tensor([0.9000, 0.9000])
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    slots: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.temperature.device

    @property
    def greedy(self) -> Tensor:
        """bool, as `temperature`: which elements are greedy."""
        return ~(self.temperature >= GREEDY_BELOW)

    @property
    def num_requests(self) -> int:
        return (self.slots if self.slots is not None else self.temperature).shape[0]

    @classmethod
    def create(
        cls,
        temperature: float | Sequence[float] | Tensor = 1.0,
        top_p: float | Sequence[float] | Tensor = 1.0,
        top_k: int | Sequence[int] | Tensor = 0,
        min_p: float | Sequence[float] | Tensor = 0.0,
        seed: int | Sequence[int] | Tensor | None = None,
        *,
        batch_size: int | None = None,
        slots: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> SamplingTensors:
        """Each argument is a scalar (for all requests), a sequence or a tensor of one element per request.

        A scalar `seed` is spread over the requests by a hash of (seed, request), so that equal prompts differ; a sequence
        or tensor is taken as it is; None draws seeds from torch's default CPU generator. `batch_size` is needed when
        everything is a scalar (default 1). Values on the host are checked; values of device tensors are not read.

        Raises ValueError for a temperature that is negative, NaN or infinite, a NaN `top_p` or `min_p`, or lengths that
        do not agree.
        """
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        sizes = {
            name: v.numel() if isinstance(v, Tensor) else len(v)
            for name, v in given.items()
            if isinstance(v, Sequence) or (isinstance(v, Tensor) and v.dim() > 0)
        }
        if batch_size is not None and (not isinstance(batch_size, numbers.Integral) or batch_size < 0):
            raise ValueError(f"SamplingTensors: batch_size must be an integer >= 0, got {_checks.describe(batch_size)}")
        if slots is not None and batch_size is None and not sizes:
            raise ValueError("SamplingTensors: batch_size must be the number of states where slots are given, got None")
        size = batch_size if batch_size is not None else max(sizes.values(), default=1)
        for name, n in sizes.items():
            if n != size:
                raise ValueError(f"SamplingTensors: {name} must have one element per request [{size}], got {n}")
        if device is None:
            device = next((v.device for v in given.values() if isinstance(v, Tensor)), torch.device("cpu"))

        def field(name: str, dtype: torch.dtype) -> Tensor:
            value = given[name]
            if isinstance(value, Tensor):
                if value.dim() > 1:
                    raise ValueError(f"SamplingTensors: {name} must be a scalar or [B], got {list(value.shape)}")
                tensor = value.to(dtype=dtype).expand(size).contiguous()
                on_host = value.device.type == "cpu" and not torch.compiler.is_compiling()
                values = value.flatten().tolist() if on_host else []
                # What float32 makes of it counts: 1e39 is infinite.
                values += tensor.tolist() if on_host and dtype == torch.float32 else []
            else:
                values = list(value) if isinstance(value, Sequence) else [value] * size
                tensor = None
            for v in values:
                if not isinstance(v, numbers.Real):
                    raise ValueError(f"SamplingTensors: {name} must be a number, got {_checks.describe(v)}")
                if name == "temperature" and not 0 <= v <= _FLOAT32_MAX:
                    raise ValueError(f"SamplingTensors: {name} must be finite and >= 0, got {v}")
                if v != v:
                    raise ValueError(f"SamplingTensors: {name} must be a number, got {v}")
                if dtype == torch.int32 and v not in (math.inf, -math.inf) and v != int(v):
                    raise ValueError(f"SamplingTensors: {name} must be an integer, got {v}")
            if dtype == torch.int32 and values:
                # Clamped as Python numbers: a cast would wrap 2^32 + 5 to 5.
                values = [int(min(max(v, -1), 2**31 - 1)) for v in values]
                tensor = torch.tensor(values, dtype=dtype).expand(size).contiguous()
            elif tensor is None:
                tensor = torch.tensor(values, dtype=dtype)
            return tensor.to(device)

        if seed is None:
            seeds = torch.randint(-(2**63), 2**63 - 1, (size,), dtype=torch.int64).to(device)
        elif isinstance(seed, numbers.Integral):
            seeds = torch.tensor([_spread(int(seed), b) for b in range(size)], dtype=torch.int64, device=device)
        elif isinstance(seed, Tensor):
            if seed.dtype not in _checks.INDEX_DTYPES or seed.dim() > 1:
                raise ValueError(f"SamplingTensors: seed must be int32 or int64 [B], got {_checks.describe(seed)}")
            seeds = seed.to(device=device, dtype=torch.int64).expand(size).contiguous()
        elif not isinstance(seed, Sequence):
            raise ValueError(
                f"SamplingTensors: seed must be an int, a sequence or a tensor, got {_checks.describe(seed)}"
            )
        else:
            for v in seed:
                if not isinstance(v, numbers.Integral):
                    raise ValueError(f"SamplingTensors: seed must be integers, got {_checks.describe(v)}")
            seeds = torch.tensor([_signed64(int(v)) for v in seed], dtype=torch.int64, device=device)
        return cls(
            temperature=field("temperature", torch.float32),
            top_p=field("top_p", torch.float32),
            top_k=field("top_k", torch.int32),
            min_p=field("min_p", torch.float32),
            seed=seeds,
            slots=slots,
        )

    @classmethod
    def from_generation_config(
        cls, config, *, batch_size: int = 1, seed: int | Sequence[int] | Tensor | None = None, device=None
    ) -> SamplingTensors:
        """Parameters of a transformers `GenerationConfig`, as its `generate` reads them.

        `do_sample=False` is greedy. None fields are what `generate` puts there: since transformers 5 the config leaves
        `top_k` None and `generate` makes it 50. One warning names every setting that would change what `generate` says
        and that these parameters do not have (penalties, banned or forced tokens, other truncations, beams).
        """
        # Earlier releases have these defaults in the config itself.
        defaults = getattr(config, "_get_default_generation_params", dict)()

        def value(name: str, default):
            v = getattr(config, name, None)
            v = defaults.get(name) if v is None else v
            return default if v is None else v

        neutral = {
            "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
            "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "suppress_tokens": None,
            "begin_suppress_tokens": None, "bad_words_ids": None, "force_words_ids": None, "constraints": None,
            "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
            "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "watermarking_config": None,
            "stop_strings": None, "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0, "dola_layers": None,
        }  # fmt: skip
        sampled = bool(value("do_sample", False))
        if sampled:
            neutral |= {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
        given = {name: value(name, default) for name, default in neutral.items()}
        ignored = [f"{n}={v!r}" for n, v in given.items() if v != neutral[n] and v not in ([], {}, ())]
        if ignored:
            warnings.warn(f"SamplingTensors: generation config settings ignored: {', '.join(ignored)}", stacklevel=2)
        return cls.create(
            temperature=value("temperature", 1.0) if sampled else 0.0,
            top_p=value("top_p", 1.0),
            top_k=value("top_k", 0),
            min_p=value("min_p", 0.0),
            seed=seed,
            batch_size=batch_size,
            device=device,
        )


class RaggedDrafts(NamedTuple):
    """Drafts in the layout that `verify_chain` takes; see `ragged_from_padded`."""

    draft_tokens: Tensor
    cu_num_draft: Tensor
    draft_rows: Tensor


def ragged_from_padded(
    draft_tokens: Tensor, num_draft: Tensor | None = None, slots: Tensor | None = None
) -> RaggedDrafts:
    """Padded drafts [B, K] as the flattened layout of `verify_chain`, without a host sync.

    draft_tokens: int32/int64 [B, K], request b's drafts first, then padding. num_draft: int32/int64 [B], clamped to
    [0, K]; None counts each row's tokens before its first negative one. slots: int32/int64 [B], the request's slot in an
    engine's [S, K, V] table of draft logits; None: slot b.

    Returns `draft_tokens` [B * K] (request-major; past the last draft -1), `cu_num_draft` int32 [B + 1] and `draft_rows`
    int64 [B * K], which maps a draft to its row of that table, slots[b] * K + i, so that it is used in place (pass it as
    `draft_rows=`; 0 past the last draft).

    >>> ragged_from_padded(torch.tensor([[5, 6, -1], [7, 8, 9]]))
    RaggedDrafts(draft_tokens=tensor([ 5,  6,  7,  8,  9, -1]), cu_num_draft=tensor([0, 2, 5], dtype=torch.int32), draft_rows=tensor([0, 1, 3, 4, 5, 0]))
    """
    op = "ragged_from_padded"
    if (
        not isinstance(draft_tokens, Tensor)
        or draft_tokens.dim() != 2
        or draft_tokens.dtype not in _checks.INDEX_DTYPES
    ):
        _checks.fail(op, "draft_tokens", "int32 or int64 [B, K]", draft_tokens)
    B, K = draft_tokens.shape
    device = draft_tokens.device
    column = torch.arange(K, device=device)
    if num_draft is None:
        lengths = (draft_tokens >= 0).to(torch.int64).cumprod(1).sum(1)
    else:
        _checks.vector(op, "num_draft", num_draft, _checks.INDEX_DTYPES, B, "B", device)
        lengths = num_draft.to(torch.int64).clamp(0, K)
    cu = torch.zeros(B + 1, dtype=torch.int64, device=device)
    cu[1:] = lengths.cumsum(0)
    # Padding lands in one spare element past the end, so that no draft is overwritten and no index is data-dependent.
    slot = torch.where(column < lengths[:, None], cu[:-1, None] + column, B * K).flatten()
    tokens = torch.full((B * K + 1,), -1, dtype=draft_tokens.dtype, device=device)
    tokens = tokens.scatter(0, slot, draft_tokens.flatten())[: B * K]
    if slots is None:
        source = torch.arange(B * K, device=device)
    else:
        _checks.vector(op, "slots", slots, _checks.INDEX_DTYPES, B, "B", device)
        source = (slots.long()[:, None] * K + column).flatten()
    rows = torch.zeros(B * K + 1, dtype=torch.int64, device=device)
    rows = rows.scatter(0, slot, source)[: B * K]
    return RaggedDrafts(tokens, cu.to(torch.int32), rows)
