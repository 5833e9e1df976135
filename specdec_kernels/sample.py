"""`sample`: one token per row, straight from raw logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _schemas
from .nucleus import Nucleus, empty_nucleus
from .params import SamplingTensors

STREAM_DRAFT = 0
STREAM_SAMPLE = 2
MAX_SAMPLES = 128


class SampleOutput(NamedTuple):
    """`tokens` int32 [N], always in [0, V); [N, num_samples] if more than one was asked for, -1 where no token is left · `status` int32 [N], bits as in `verify_chain` · `logprobs` float32 [N], log p
    of the token under the filtered distribution (-inf where there is none), shaped as `tokens`, or None · `nucleus` [N] or None."""

    tokens: Tensor
    status: Tensor
    logprobs: Tensor | None = None
    nucleus: Nucleus | None = None


def sample(
    logits: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    stream: int = STREAM_SAMPLE,
    ids: Tensor | None = None,
    num_samples: int = 1,
    target_to_draft: Tensor | None = None,
    filter_order: str = "hf",
    return_nucleus: bool = False,
    logprobs: int = 0,
    out: SampleOutput | None = None,
    backend: str = "auto",
) -> SampleOutput:
    """Samples a token from each row's filtered distribution by an exponential race over Philox4x32-10 noise.

        token = argmax over kept v of  log p(v) - log e_v,   e_v = -log1p(-u_v)

    with u_v lane v & 3 of the block keyed (seed; index v >> 2, position, stream | id << 8). The draw depends on nothing
    but the row, its parameters and that key: not on the batch, the slot or the thread count.

    For plain sampling give the token's absolute position (stream 2). For draft proposals that `verify_chain` will check
    give `stream=0`, the step's anchor (its first position) as `position` and the draft offset 0, 1, ... in `ids`; under
    rule "coupled" propose on stream 2 at the absolute position instead.

    Args:
        logits: [N, V] float32, bfloat16 or float16; last dimension contiguous.
        params: of N requests, or with `rows` of any number. Temperature below 1e-5: the lowest id of the maxima.
        position: int64 [N]; None is 0 for every row, and the caller gives fresh seeds for every draw.
        rows: int32/int64 [N], the request of each row (out-of-range entries are clamped).
        stream: 0 or 2 (1 is the accept coins').
        ids: int32/int64 [N], 0 <= id < 2^24; None is 0.
        num_samples: how many tokens of each row, 1 to 128, without replacement: the first of the race, each drawn from what its
            elders left of p (Gumbel top-k). A greedy row gives its largest logits in order. For the children of a tree node.
        target_to_draft: int32/int64 [Vt] for rows over a reduced draft vocabulary: entry v is the row's column of target
            id v, or -1; each column that has mass must be some id's, or the draws are not those of q. Noise is keyed by target ids and target ids are returned.
        filter_order: as in `nucleus`.
        return_nucleus: also return each row's Nucleus; pass it to `verify_chain(draft_nucleus=...)`, which then need not
            read the draft rows again.
        logprobs: 0, or 1 for the chosen token's log-probability.
        out: a SampleOutput of the same shapes to write into.
        backend: "auto", "native", "triton" or "eager".

    Returns:
        SampleOutput. A row with nothing finite gives token 0 and status bit 1.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    No host sync, no host generator. Tokens of probability below about 1e-10 are under-sampled (32-bit uniforms).

    >>> params = SamplingTensors.create(temperature=[0.0, 1.0], seed=[0, 7])
    >>> sample(torch.tensor([[1.0, 3.0, 3.0], [0.0, -torch.inf, -torch.inf]]), params).tokens
    tensor([1, 0], dtype=torch.int32)
    """
    op = "sample"
    order = _checks.row_op(op, logits, params, rows, filter_order, _schemas.FILTER_ORDERS)
    N, device = logits.shape[0], logits.device
    check_draw(op, N, device, position, ids, target_to_draft, stream)
    if logprobs not in (0, 1):
        _checks.fail(op, "logprobs", "0 or 1", logprobs)
    if not isinstance(num_samples, int) or not 1 <= num_samples <= MAX_SAMPLES:
        _checks.fail(op, "num_samples", f"an int from 1 to {MAX_SAMPLES}", num_samples)
    shape = (N,) if num_samples == 1 else (N, num_samples)
    if out is None:
        out = SampleOutput(
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(N, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device) if logprobs else None,
            empty_nucleus((N,), device) if return_nucleus else None,
        )
    else:
        if not isinstance(out, SampleOutput):
            _checks.fail(op, "out", "a SampleOutput", out)
        check_drawn(op, out, shape, N, device)
        if (out.logprobs is not None) != bool(logprobs) or (out.nucleus is not None) != return_nucleus:
            _checks.fail(op, "out", "a SampleOutput made with the same logprobs and return_nucleus", "other fields")
        if out.logprobs is not None:
            _checks.output(op, "out.logprobs", out.logprobs, torch.float32, shape, device)
    if N:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(
            logits,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.seed,
            params.slots,
            position,
            rows,
            ids,
            target_to_draft,
            stream,
            order,
            out.tokens,
            out.status,
            out.logprobs,
            *(out.nucleus or (None, None, None)),
        )
    return out


def check_draw(
    op: str,
    N: int,
    device: torch.device,
    position: Tensor | None,
    ids: Tensor | None,
    target_to_draft: Tensor | None,
    stream: int,
) -> None:
    """The arguments that a draw from each of N rows is keyed by."""
    if position is not None:
        _checks.vector(op, "position", position, (torch.int64,), N, "N", device)
    if ids is not None:
        _checks.vector(op, "ids", ids, _checks.INDEX_DTYPES, N, "N", device)
    if target_to_draft is not None:
        _checks.vector(op, "target_to_draft", target_to_draft, _checks.INDEX_DTYPES, 1, "V", device, at_least=True)
    if stream not in (STREAM_DRAFT, STREAM_SAMPLE):
        _checks.fail(op, "stream", "0 (draft proposals) or 2 (plain sampling)", stream)


def check_drawn(op: str, out, shape: tuple[int, ...], N: int, device: torch.device) -> None:
    """The buffers that every draw writes."""
    _checks.output(op, "out.tokens", out.tokens, torch.int32, shape, device)
    _checks.output(op, "out.status", out.status, torch.int32, (N,), device)
    for name, tensor in zip(Nucleus._fields, out.nucleus or (), strict=False):
        _checks.output(op, f"out.nucleus.{name}", tensor, torch.float32, (N,), device)
