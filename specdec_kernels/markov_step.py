"""`markov_step`: one step of a drafter with a Markov head (DSpark), a low-rank bias of the token before and then a draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _schemas
from .nucleus import Nucleus, empty_nucleus
from .params import SamplingTensors
from .sample import STREAM_DRAFT, check_draw, check_drawn


class MarkovOutput(NamedTuple):
    """`tokens` int32 [N], always in [0, V) · `nucleus` of the written rows [N], or None · `status` int32 [N], bits as in `verify_chain` · `logits` [N, Vd], the
    written rows: q, as `verify_chain(draft_logits=...)` reads it."""

    tokens: Tensor
    nucleus: Nucleus | None
    status: Tensor
    logits: Tensor


def markov_step(
    base_logits: Tensor,
    tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    stream: int = STREAM_DRAFT,
    ids: Tensor | None = None,
    target_to_draft: Tensor | None = None,
    filter_order: str = "hf",
    return_nucleus: bool = False,
    logits_out: Tensor | None = None,
    out: MarkovOutput | None = None,
    backend: str = "auto",
) -> MarkovOutput:
    """Adds a Markov head's bias to each row of logits, writes the row, and draws a token from it.

        z[n] = base_logits[n] + w1[tokens[n]] @ w2.T        token[n] ~ softmax(z[n] / T), filtered

    The sampling step of a DSpark drafter (arXiv 2607.05147, vanilla head), once for each draft from left to right: `tokens`
    are the anchors first, then the tokens of the step before. The product is summed in float32 (plain torch: float64) and z rounded once, to
    the dtype of `base_logits`; the token and the nucleus are exactly those that `sample` gives on the rounded row, so that
    `verify_chain` reads the q that was sampled. Backends agree on z up to the rounding of the product.

    Args:
        base_logits: [N, Vd] float32, bfloat16 or float16; last dimension contiguous, row stride free.
        tokens: int32/int64 [N], target ids. One that is negative or >= V adds no bias; nothing is read through it.
        w1: [V, r] float32, bfloat16 or float16, r >= 1 (on Triton <= 4,096): the embedding of the token before.
        w2: [Vd, r] of w1's dtype, which need not be that of the logits: the weight of `nn.Linear(r, Vd, bias=False)`. Both:
            last dimension contiguous, row stride free.
        params, position, rows, ids, target_to_draft, filter_order: as in `sample`.
        stream: 0 for proposals that `verify_chain` will check, with the step's anchor in `position` and the draft offset in
            `ids`; 2 under rule "coupled", with the absolute position.
        return_nucleus: also return the nucleus of each written row; pass it to `verify_chain(draft_nucleus=...)`.
        logits_out: where the rows are written, [N, Vd] of the logits' dtype; None allocates. It may be `base_logits` itself, or
            a view of a larger buffer such as [B, K, Vd][:, k]. Memory shared with `base_logits` in any other way is the
            caller's error.
        out: a MarkovOutput of the same shapes to write into; its `logits` are then `logits_out`, and its `tokens` may be the
            argument `tokens`.
        backend: "auto", "native", "triton" or "eager".

    Returns:
        MarkovOutput. A row with nothing finite gives token 0 and status bit 1, one with a NaN bit 2.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    No host sync, no host generator, no gradients. A row's token depends on nothing but the row, its token, its parameters and its key.

    >>> params = SamplingTensors.create(temperature=0.0, batch_size=2)
    >>> w1, w2 = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [0.0], [3.0]])
    >>> step = markov_step(torch.tensor([[0.0, 1.0, -1.0]] * 2), torch.tensor([0, 1]), w1, w2, params)
    >>> step.logits
    tensor([[ 0.,  1., -1.],
            [ 0.,  1.,  2.]])
    >>> step.tokens
    tensor([1, 2], dtype=torch.int32)
    """
    op = "markov_step"
    order = _checks.row_op(op, base_logits, params, rows, filter_order, _schemas.FILTER_ORDERS, name="base_logits")
    N, device = base_logits.shape[0], base_logits.device
    _checks.vector(op, "tokens", tokens, _checks.INDEX_DTYPES, N, "N", device)
    _check_head(op, w1, w2, base_logits)
    check_draw(op, N, device, position, ids, target_to_draft, stream)
    if out is None:
        if logits_out is None:
            logits_out = torch.empty(base_logits.shape, dtype=base_logits.dtype, device=device)
        _check_rows(op, "logits_out", logits_out, base_logits)
        out = MarkovOutput(
            torch.empty(N, dtype=torch.int32, device=device),
            empty_nucleus((N,), device) if return_nucleus else None,
            torch.empty(N, dtype=torch.int32, device=device),
            logits_out,
        )
    else:
        if not isinstance(out, MarkovOutput):
            _checks.fail(op, "out", "a MarkovOutput", out)
        check_drawn(op, out, (N,), N, device)
        if (out.nucleus is not None) != return_nucleus:
            _checks.fail(op, "out", "a MarkovOutput made with the same return_nucleus", "other fields")
        _check_rows(op, "out.logits", out.logits, base_logits)
        if logits_out is not None and logits_out is not out.logits:
            _checks.fail(op, "logits_out", "None where out is given, or out.logits", logits_out)
    if N:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(
            base_logits.detach(),
            tokens,
            w1.detach(),
            w2.detach(),
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
            out.logits,
            out.tokens,
            out.status,
            *(out.nucleus or (None, None, None)),
        )
    return out


def _check_head(op: str, w1, w2, base_logits: Tensor) -> None:
    device, dtypes = base_logits.device, _checks.LOGITS_DTYPES
    known = isinstance(w1, Tensor) and w1.dim() == 2 and w1.dtype in dtypes and w1.device == device
    if not known or w1.shape[0] < 1 or w1.shape[1] < 1:
        _checks.fail(op, "w1", f"float32 or bfloat16 or float16 [V >= 1, r >= 1] on {device}", w1)
    shape, kind = (base_logits.shape[1], w1.shape[1]), str(w1.dtype).removeprefix("torch.")
    if not isinstance(w2, Tensor) or tuple(w2.shape) != shape or w2.dtype != w1.dtype or w2.device != device:
        _checks.fail(op, "w2", f"{kind} [Vd={shape[0]}, r={shape[1]}], of w1's dtype and rank, on {device}", w2)
    for name, weight in (("w1", w1), ("w2", w2)):
        if not _checks.dense(weight, 1):
            _checks.fail(op, name, "contiguous in its last dimension", f"strides {list(weight.stride())}")


def _check_rows(op: str, name: str, value, base_logits: Tensor) -> None:
    """A caller's buffer for the written rows: strided, but no two elements at one place."""
    shape, dtype, device = tuple(base_logits.shape), base_logits.dtype, base_logits.device
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype or value.device != device:
        _checks.fail(op, name, f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}", value)
    if not _checks.dense(value, 1):
        _checks.fail(op, name, "contiguous in its last dimension", f"strides {list(value.stride())}")
    if shape[0] > 1 and value.stride(0) < shape[1]:
        _checks.fail(op, name, "of rows that do not share memory", f"strides {list(value.stride())}")
