"""What a method of the decoding bench is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.decoding import SpecDecodeStats, SpeculativeDecoder


@dataclass
class Result:
    """tokens: of each row · calls: target forwards, the prefill included · stats: of ours."""

    tokens: list[list[int]]
    calls: int
    stats: SpecDecodeStats | None = None


@dataclass
class Method:
    """run(ids, mask, temperature, new tokens, seed) · batches: whether it takes more than one row."""

    name: str
    run: Callable[[Tensor, Tensor, float, int, int], Result]
    batches: bool = True
    decoder: SpeculativeDecoder | None = None


def ends_of(model) -> set[int]:
    """Tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
