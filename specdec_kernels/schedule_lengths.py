"""`schedule_lengths`: how many drafts of each request a step verifies."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _backends, _checks


def schedule_lengths(
    confidence: Tensor,
    num_draft: Tensor | None = None,
    *,
    steps_per_second: Tensor | None = None,
    budget: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Chooses verify lengths from per-draft confidences, non-anticipating: whether a draft is verified does not depend on its
    value, so `verify_chain` stays exact under rules "token", "block" and "coupled" (DSpark 2607.05147, algorithm 1).

    Draft j of request r survives with a(r, j) = c(r, 0) .. c(r, j). Drafts are admitted in the order of a, largest first (equal
    ones by offset, then request), so a request's drafts are a prefix. With `steps_per_second`: as long as each raises

        (B + sum of admitted a) * steps_per_second[B + number admitted]

    (a rounded down to multiples of 2^-40) and not past the first that does not: the best prefix of all would depend on drafts' values and bias the text. With `budget`:
    that many.

    Args:
        confidence: float32 [B, K], c(r, j) in [0, 1]: the probability that draft j is accepted given that those before it were,
            known before it is drawn. Outside values are clamped, NaN is 0.
        num_draft: int32/int64 [B], drafts of each request, clamped to [0, K]; None: K each.
        steps_per_second: float32 [T], of a verification over n tokens (a request's row and its drafts' count), profiled; no more
            than T - 1 tokens are verified.
        budget: drafts to verify in all, >= 0, from data that is older than this step's drafts.
        out: int32 [B] to write into.

    Returns:
        int32 [B].

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.

    >>> schedule_lengths(torch.tensor([[0.9, 0.5], [0.7, 0.9]]), budget=3)
    tensor([1, 2], dtype=torch.int32)
    """
    op = "schedule_lengths"
    if not isinstance(confidence, Tensor) or confidence.dim() != 2 or confidence.dtype != torch.float32:
        _checks.fail(op, "confidence", "float32 [B, K]", confidence)
    B, device = confidence.shape[0], confidence.device
    if num_draft is not None:
        _checks.vector(op, "num_draft", num_draft, _checks.INDEX_DTYPES, B, "B", device)
    if (steps_per_second is None) == (budget is None):
        got = "neither" if budget is None else "both"
        _checks.fail(op, "steps_per_second", "given, or budget instead of it", got)
    if steps_per_second is not None:
        _checks.vector(op, "steps_per_second", steps_per_second, (torch.float32,), 1, "T", device, at_least=True)
    elif not isinstance(budget, (int, torch.SymInt)) or isinstance(budget, bool) or not 0 <= budget < 1 << 63:
        _checks.fail(op, "budget", "an int >= 0, below 2^63", budget)
    if out is None:
        out = torch.empty(B, dtype=torch.int32, device=device)
    else:
        _checks.output(op, "out", out, torch.int32, (B,), device)
    if B:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(confidence.contiguous(), num_draft, steps_per_second, -1 if budget is None else budget, out)
    return out
