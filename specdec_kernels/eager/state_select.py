"""`state_select` in plain torch."""

import torch

from .. import _backends
from ._moves import bits, only


def state_select(states, out, num_accepted, indices) -> None:
    request = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    snapshot = num_accepted.long().clamp(0, states[0].shape[1] - 1)
    if not out:
        for state in map(bits, states):
            state[request, 0] = state[request, snapshot]
        return
    slot = request if indices is None else indices.long()
    there = (slot >= 0) & (slot < out[0].shape[0])
    source, snapshot, into = only(there, request, snapshot, slot)
    for state, result in zip(map(bits, states), map(bits, out), strict=True):
        result[into] = torch.where(there.any(), state[source, snapshot], result[into])


_backends.register_eager("state_select", state_select)
