"""One step of a drafter with a Markov head (DSpark): a low-rank bias of the token before, then one draw.

    z = base + W1[token] W2^T        token' ~ softmax(z / T), filtered

The row that is sampled is z rounded to the dtype of `base`: that row is kept and is the q that verification reads.
"""

from typing import NamedTuple

from torch import Tensor

from . import rng
from .nucleus import Nucleus
from .sample import sample


class MarkovResult(NamedTuple):
    """tokens int32 [N] · nucleus [N] of the rounded row · status int32 [N] · logits [N, Vd], the rounded row · logprobs
    float64 [N] · margin float64 [N] of the draw from the rounded row, as `SampleResult`'s: a kernel whose row rounds to
    other values may draw otherwise."""

    tokens: Tensor
    nucleus: Nucleus
    status: Tensor
    logits: Tensor
    logprobs: Tensor
    margin: Tensor


def markov_logits(base_logits: Tensor, tokens: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """float64 [N, Vd], not rounded. A token outside w1 adds no bias."""
    out = base_logits.detach().cpu().double()
    for n, token in enumerate(tokens.tolist()):
        if 0 <= token < w1.shape[0]:
            bias = w2.detach().cpu().double() @ w1[token].detach().cpu().double()
            out[n] = out[n] + bias
    return out


def markov_step(
    base_logits: Tensor,
    tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    params,
    position: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    stream: int = rng.STREAM_DRAFT,
    ids: Tensor | None = None,
    target_to_draft: Tensor | None = None,
    filter_order: str = "hf",
) -> MarkovResult:
    """`tokens` [N]: the token before each row's. `w1` [V, r] over target ids, `w2` [Vd, r] over the columns of `base_logits`
    [N, Vd]. The rest as in `sample`."""
    logits = markov_logits(base_logits, tokens, w1, w2).to(base_logits.dtype)
    drawn = sample(
        logits, params, position, rows=rows, stream=stream, ids=ids, target_to_draft=target_to_draft, filter_order=filter_order
    )  # fmt: skip
    return MarkovResult(drawn.tokens, drawn.nucleus, drawn.status, logits, drawn.logprobs, drawn.margin)
