"""What is kept back from training, and how a drafter does on it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from .. import SamplingTensors
from ..decoding import Drafter, SpeculativeDecoder
from .texts import Text

_END = 32  # tokens by which prompts are told apart


def split(texts: Sequence[Text], share: float) -> tuple[list[int], list[int]]:
    """(trained, held out): numbers of the texts. Held out are the first `share` of them, at least one; texts whose prompts end as
    one of theirs does are about the same piece of text and in neither.

    Raises ValueError where nothing is left to train on.
    """
    held = max(1, round(share * len(texts)))
    seen = {_end(text) for text in texts[:held]}
    trained = [i for i in range(held, len(texts)) if _end(texts[i]) not in seen]
    if not trained:
        raise ValueError(
            f"train: --held-out must leave texts to train on, got {share} of {len(texts)} texts, prompts of the same end left out"
        )
    return trained, list(range(held))


def _end(text: Text) -> tuple[int, ...]:
    """Of a text without prompt, how it begins."""
    end = text.start if text.start > 1 else _END
    return tuple(text.tokens[max(end - _END, 0) : end])


def decode(target, drafter: Drafter, texts: Sequence[Text], *, prompts: int = 8, new_tokens: int = 64) -> dict:
    """Greedy decoding of the texts' prompts one by one: `tokens_per_call`, and `speedup`, the median over the prompts of the time
    without the drafter over the time with it. Nothing where no text has a prompt."""
    chosen = [text.tokens[: text.start] for text in texts if text.start > 1][:prompts]
    if not chosen:
        return {}
    greedy = SamplingTensors.create(temperature=0.0, batch_size=1)
    plain = SpeculativeDecoder(target)
    ours = SpeculativeDecoder(target, drafter, adaptive=False, forward=plain.forward)
    emitted = rows = 0
    ratios = []
    for number, prompt in enumerate([chosen[0], *chosen]):
        ids = torch.tensor([prompt], device=target.device)
        slow, fast = (d.generate(ids, params=greedy, max_new_tokens=new_tokens).stats for d in (plain, ours))
        if number:  # the first run of all warms up
            emitted, rows = emitted + fast.emitted, rows + fast.target_rows
            ratios.append(fast.tokens_per_second / slow.tokens_per_second)
    if not rows:
        return {}
    return {"prompts": len(chosen), "tokens_per_call": round(emitted / rows, 3), "speedup": round(median(ratios), 3)}
