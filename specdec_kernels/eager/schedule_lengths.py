"""`schedule_lengths` in plain torch."""

import torch

from .. import _backends

FIXED = 1 << 40


def schedule_lengths(confidence, num_draft, steps_per_second, budget, lengths) -> None:
    B, K = confidence.shape
    device = confidence.device
    offset = torch.arange(K, device=device)
    c = torch.where(confidence.isnan(), 0.0, confidence).clamp(0.0, 1.0)
    survives = torch.ones(B, K + 1, device=device)
    for j in range(K):  # one product after another, as every backend rounds them
        survives[:, j + 1] = survives[:, j] * c[:, j]
    count = torch.full((B,), K, device=device) if num_draft is None else num_draft.long().clamp(0, K)
    there = offset < count[:, None]
    # By offset, then request: a stable sort keeps that among equal ones.
    value = torch.where(there, survives[:, 1:], -1.0).t().flatten()
    request = torch.arange(B, device=device).expand(K, B).flatten()
    ordered, place = value.sort(descending=True, stable=True)
    real = ordered >= 0
    n = torch.arange(1, B * K + 1, device=device)
    if steps_per_second is None:
        admitted = real & (n <= budget)
    else:
        most = steps_per_second.shape[0] - 1
        tokens = torch.cat([torch.full((1,), B, device=device), B + n])
        # In fixed point: the sum is the same in any order.
        admits = torch.nn.functional.pad((torch.where(real, ordered, 0.0) * FIXED).long(), (1, 0), value=B * FIXED)
        rate = admits.cumsum(0).double() * steps_per_second.double()[tokens.clamp_max(most)]
        admitted = (real & (rate[1:] > rate[:-1]) & (B + n <= most)).long().cumprod(0).bool()
    lengths.zero_()
    lengths.scatter_add_(0, request[place], admitted.to(torch.int32))


_backends.register_eager("schedule_lengths", schedule_lengths)
