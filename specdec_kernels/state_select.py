"""`state_select`: the recurrent state behind the last accepted token, of the snapshots that a step's forward left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _backends, _checks


def state_select(
    states: Sequence[Tensor],
    num_accepted: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    indices: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Rolls recurrent and convolution states (Mamba, GDN, KDA) back to the accepted text, in every layer: snapshot
    num_accepted[b] of request b becomes its state.

    Args:
        states: of every layer, a list or tuple of tensors [>= B, S, ...] with elements of 1, 2 or 4 bytes, moved as bits.
            Snapshot 0 is the state behind the step's first token (the last of the text), snapshot j that behind draft j. A
            snapshot is contiguous, the strides of the two dimensions before it are free.
        num_accepted: int32 [B], as the verifiers return it; clamped to 0..S-1.
        out: None moves the snapshot to place 0 of its own row; a request with none accepted, as in a step without drafts, is
            left as it is. Or, for each of `states`, a tensor [slots, ...] of its dtype and snapshots' shape that shares no
            memory with `states`: request b's state goes to row indices[b], or b.
        indices: int32/int64 [B], only with `out`. A request whose row is not there (-1, past the end) is skipped.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    One launch moves the states of all layers that agree in element size, shape and strides. Nothing waits for the device, but
    for the first Triton call with a set of states, as in `kv_compact`.

    >>> states = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
    >>> state_select([states], torch.tensor([2, 0], dtype=torch.int32))
    >>> states[:, 0].flatten()
    tensor([3., 4.])
    """
    op = "state_select"
    if not isinstance(num_accepted, Tensor) or num_accepted.dim() != 1:
        _checks.fail(op, "num_accepted", "int32 [B]", num_accepted)
    B, device = num_accepted.shape[0], num_accepted.device
    _checks.vector(op, "num_accepted", num_accepted, (torch.int32,), B, "B", device)
    _checks.tensors(op, "states", states, device)
    if indices is not None:
        if out is None:
            _checks.fail(op, "indices", "None without out", indices)
        _checks.vector(op, "indices", indices, _checks.INDEX_DTYPES, B, "B", device)
    if out is not None:
        _checks.tensors(op, "out", out, device)
        if len(out) != len(states):
            _checks.fail(op, "out", f"a tensor for each of {len(states)} states", f"{len(out)}")
    groups = _checks.alike(states) if out is None else _checks.alike(states, out)
    for i in (members[0] for members in groups):
        _check_states(op, f"states[{i}]", states[i], B)
    for i in range(len(out or ())):
        _check_out(op, f"out[{i}]", out[i], states[i], B if indices is None else 0)
    if not B:
        return
    run = _backends.op(op, _backends.resolve(op, backend, device))
    for members in groups:
        into = [] if out is None else [out[i] for i in members]
        if states[members[0]].numel() and all(t.numel() for t in into[:1]):
            run([states[i] for i in members], into, num_accepted, indices)


def _check_states(op: str, name: str, states: Tensor, B: int) -> None:
    if states.dim() < 2 or states.shape[0] < B or states.shape[1] < 1:
        _checks.fail(op, name, f"[>= B={B}, S >= 1, ...]", states)
    _check_strides(op, name, states, 2)


def _check_out(op: str, name: str, out: Tensor, states: Tensor, rows: int) -> None:
    if out.dtype != states.dtype or out.shape[1:] != states.shape[2:] or out.dim() < 1 or out.shape[0] < rows:
        what = f"{str(states.dtype).removeprefix('torch.')} {[f'>= {rows}', *states.shape[2:]]}".replace("'", "")
        _checks.fail(op, name, what, out)
    _check_strides(op, name, out, 1)


def _check_strides(op: str, name: str, t: Tensor, first: int) -> None:
    """A state is contiguous, and no two share memory."""
    if not _checks.dense(t, first):
        _checks.fail(op, name, f"contiguous from dimension {first}", f"strides {list(t.stride())}")
    if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
        _checks.fail(op, name, "of elements that do not share memory", f"strides {list(t.stride())}")
