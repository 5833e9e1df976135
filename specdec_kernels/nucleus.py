"""`nucleus`: a filtered distribution as three numbers per row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _schemas
from .params import SamplingTensors


class Nucleus(NamedTuple):
    """A row's distribution beside its logits z, float32 [N] each (or [B, K + 1]):

        p(x) = exp((z_x - row_max) / T - log_mass)   if z_x >= cutoff   else 0

    with z_x - row_max := 0 at the maximum, +inf included. `cutoff` is the smallest kept logit, -inf where no filter is on
    (+inf where one is on and the row holds +inf). `row_max` is the largest logit, `log_mass` the log of the sum of
    exp((z - row_max) / T) over the kept tokens, so log p(argmax) = -log_mass. A greedy row is (row_max, row_max, 0) and stands for one-hot at the lowest id of its maxima;
    a row with nothing to keep is (+inf, -inf, -inf).
    """

    cutoff: Tensor
    row_max: Tensor
    log_mass: Tensor


def nucleus(
    logits: Tensor,
    params: SamplingTensors,
    *,
    rows: Tensor | None = None,
    filter_order: str = "hf",
    status: Tensor | None = None,
    out: Nucleus | None = None,
    backend: str = "auto",
) -> Nucleus:
    """Cutoff, maximum and log-mass of each row of raw logits under temperature, top-k, top-p and min-p.

    top-k keeps every value >= the k-th largest; top-p every value >= t, t the largest threshold whose mass reaches p;
    min-p every p(x) >= min_p * max p. Ties are always kept together, so the result does not depend on sort order. Each row
    is read from memory once.

    Args:
        logits: [N, V] float32, bfloat16 or float16; last dimension contiguous, row stride free. NaN counts as -inf.
        params: of N requests, or with `rows` of any number.
        rows: int32/int64 [N], the request of each row; None: row n is request n. Out-of-range entries are clamped.
        filter_order: "hf": top-k, then top-p over the mass top-k left, then min-p; "vllm": min-p, top-k, then top-p over
            what both left; "joint": all three on the unfiltered distribution (FlashInfer, SGLang).
        status: int32 [N] output of status bits (1 empty row, 2 NaN seen), or None.
        out: Nucleus of float32 [N] buffers to write into.
        backend: "auto", "native", "triton" or "eager".

    Returns:
        Nucleus of float32 [N].

    Raises:
        ValueError: an argument of the wrong shape, dtype or device; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    No host sync, no randomness; deterministic for any thread count and batch.

    >>> p = SamplingTensors.create(temperature=1.0, top_k=2)
    >>> nucleus(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), p).cutoff
    tensor([2.])
    """
    op = "nucleus"
    order = _checks.row_op(op, logits, params, rows, filter_order, _schemas.FILTER_ORDERS)
    N, device = logits.shape[0], logits.device
    if out is None:
        out = empty_nucleus((N,), device)
    else:
        if not isinstance(out, tuple) or len(out) != 3:
            _checks.fail(op, "out", "a Nucleus", out)
        for name, tensor in zip(Nucleus._fields, out, strict=True):
            _checks.output(op, f"out.{name}", tensor, torch.float32, (N,), device)
    if status is None:
        status = torch.empty(N, dtype=torch.int32, device=device)
    else:
        _checks.output(op, "status", status, torch.int32, (N,), device)
    if N:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(
            logits,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.slots,
            rows,
            order,
            *out,
            status,
        )
    return out


def empty_nucleus(shape: tuple[int, ...], device: torch.device) -> Nucleus:
    # Separate tensors: unbinding one of [3, ...] costs several times as much.
    return Nucleus(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)))
