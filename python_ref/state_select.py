"""The recurrent state behind the last accepted token, of the snapshots that a step's forward left."""

from torch import Tensor


def state_select(
    states: list[Tensor], num_accepted: Tensor, out: list[Tensor] | None = None, indices: Tensor | None = None
) -> list[Tensor]:
    """Arguments as `specdec_kernels.state_select`, which writes into `out` or `states`; here those are left alone and copies
    returned."""
    results = []
    for layer, snapshots in enumerate(states):
        result = (snapshots if out is None else out[layer]).clone()
        for b, accepted in enumerate(num_accepted.tolist()):
            state = snapshots[b, min(max(accepted, 0), snapshots.shape[1] - 1)]
            slot = b if indices is None else int(indices[b])
            if out is None:
                result[b, 0] = state
            elif 0 <= slot < result.shape[0]:
                result[slot] = state
        results.append(result)
    return results
