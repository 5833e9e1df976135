"""How many drafts of each request to verify, from the drafter's own confidences, without looking at a draft before deciding
about it.

Draft j of request r survives with a(r, j) = c(r, 1) .. c(r, j). Drafts are admitted one by one, largest a first (equal ones by
offset, then by request; so a request's drafts come in their order). Source: DSpark (2607.05147), algorithm 1.

Early stopping: with n drafts admitted a step yields tau = B + sum a tokens and runs steps_per_second[B + n] times a second;
admission stops at the first draft that does not raise their product. (Survivals are added as multiples of 2^-40, rounded
down: their sum must not depend on the order.) Whether draft j is admitted then depends on what was known
before it was drawn (its confidence is), which keeps verification exact. Taking the best n of all instead would look at
confidences that depend on earlier drafts' values, and is biased (python tests: (.85, .15) instead of (.7, .3)).

Budget: the first `budget` drafts of the same order. a never grows along a request, so a later draft of a request cannot displace
an earlier one.
"""

import math

import torch
from torch import Tensor

FIXED = 1 << 40


def schedule_lengths(
    confidence: Tensor,
    num_draft: Tensor | None = None,
    *,
    steps_per_second: Tensor | None = None,
    budget: int | None = None,
) -> Tensor:
    """int32 [B]: drafts to verify of each request; arguments as `specdec_kernels.schedule_lengths`."""
    if (steps_per_second is None) == (budget is None):
        raise ValueError("exactly one of steps_per_second and budget must be given")
    B, K = confidence.shape
    order = []
    for b in range(B):
        survives = 1.0
        for j in range(min(max(int(num_draft[b]), 0), K) if num_draft is not None else K):
            c = float(confidence[b, j])
            # float32 products: the order is part of the definition.
            survives = float(
                torch.tensor(survives * (0.0 if math.isnan(c) else min(max(c, 0.0), 1.0)), dtype=torch.float32)
            )
            order.append((-survives, j, b))
    order.sort()
    lengths = torch.zeros(B, dtype=torch.int32)
    if budget is not None:
        for _, _, b in order[:budget]:
            lengths[b] += 1
        return lengths
    tau = B * FIXED
    best = float(tau) * float(steps_per_second[min(B, len(steps_per_second) - 1)])
    for n, (minus_survives, _, b) in enumerate(order, 1):
        if B + n >= len(steps_per_second):
            break
        tau += int(-minus_survives * FIXED)
        rate = float(tau) * float(steps_per_second[B + n])
        if not rate > best:
            break
        best = rate
        lengths[b] += 1
    return lengths
