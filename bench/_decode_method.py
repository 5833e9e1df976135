"""What a method of the decoding bench is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def calls_of(model) -> Iterator[list[None]]:
    """A list with an element for each forward of the model meanwhile."""
    calls: list[None] = []
    # A hook that stayed would keep the packed forward from being used.
    hook = model.register_forward_pre_hook(lambda _module, _args: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


def ends_of(model) -> set[int]:
    """Tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
