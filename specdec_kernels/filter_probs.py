"""`filter_probs`: the renormalised probabilities themselves, for engines that want the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _backends, _checks, _schemas
from .params import SamplingTensors


def filter_probs(
    logits: Tensor,
    params: SamplingTensors,
    *,
    rows: Tensor | None = None,
    filter_order: str = "hf",
    status: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(logits / T) over the tokens that top-k, top-p and min-p keep, 0 elsewhere.

    What FlashInfer and SGLang call `softmax` followed by `top_k_renorm_probs` / `top_p_renorm_probs`, from raw logits and
    with all ties kept. `verify_chain` and `sample` do not need it; it writes [N, V] floats. Row sums are 1 up to float32
    rounding, without gradients; a greedy row (T < 1e-5) is one-hot at the lowest id of its maxima; an empty row is all 0.

    Args, errors and guarantees as `nucleus`; `out` is float32 [N, V], contiguous.

    Returns:
        float32 [N, V].

    >>> p = SamplingTensors.create(temperature=1.0, top_k=1)
    >>> filter_probs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), p)
    tensor([[0.0000, 0.5000, 0.5000, 0.0000]])
    """
    op = "filter_probs"
    order = _checks.row_op(op, logits, params, rows, filter_order, _schemas.FILTER_ORDERS)
    N, device = logits.shape[0], logits.device
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=device)
    else:
        _checks.output(op, "out", out, torch.float32, tuple(logits.shape), device)
    if status is None:
        status = torch.empty(N, dtype=torch.int32, device=device)
    else:
        _checks.output(op, "status", status, torch.int32, (N,), device)
    if N:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(
            logits, params.temperature, params.top_p, params.top_k, params.min_p, params.slots, rows, order, out, status
        )
    return out
