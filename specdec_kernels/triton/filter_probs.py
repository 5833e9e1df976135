"""`filter_probs` in Triton: two launches, the nucleus of each row and the row of probabilities."""

import triton
import triton.language as tl

from ._launch import OPTIONS, TILE, check_vocab, maxima_of, subtile_of, workspace
from ._numerics import INF
from ._race import probability
from ._row import slot_of, space_of, temperature_of
from .nucleus import launch_nucleus


@triton.jit(do_not_specialize=["num_slots", "num_params", "tiles"])
def filter_probs_kernel(
    logits, stride, V, temperature, slots, num_slots, num_params, rows, cutoff, row_max, log_mass, peak, probs, space,
    tiles, TILE: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Program n * tiles + t writes tile t of row n.

    Bytes: 4 V written; read, the subtiles that reach the cutoff.
    """
    SUBS: tl.constexpr = TILE // SUB
    n = (tl.program_id(0) // tiles).to(tl.int64)
    t = tl.program_id(0) % tiles
    slot = slot_of(n, rows, slots, num_slots, num_params)
    greedy, _, scale = temperature_of(temperature + slot)
    c, m, mass = tl.load(cutoff + n), tl.load(row_max + n), tl.load(log_mass + n)
    sub = t * SUBS + tl.arange(0, SUBS)
    token = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    p = tl.zeros([SUBS, SUB], tl.float32)
    if greedy:
        if m > -INF:
            p = (token == tl.load(peak + n)).to(tl.float32)
    else:
        reached = tl.load(space_of(space, n, MAXIMA) + sub, mask=sub * SUB < V, other=-INF) >= c
        z = tl.load(logits + n * stride + token, mask=reached[:, None] & (token < V), other=-INF).to(tl.float32)
        p = probability(z, c, m, mass, scale)
    tl.store(probs + n * V + token, p, mask=token < V)


def filter_probs(logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, probs, status) -> None:
    N, V = logits.shape
    check_vocab("filter_probs", "logits", V)
    maxima, SUB, tiles = maxima_of(V), subtile_of(V), -(-V // TILE)
    found = {"cutoff": N, "row_max": N, "log_mass": N, "peak": N}
    with workspace(N, maxima, {"done": N}, logits.device, **found) as scratch:
        launch_nucleus(
            logits, temperature, top_p, top_k, min_p, slots, rows, filter_order,
            status=status, maxima=maxima, SUB=SUB, **scratch,
        )  # fmt: skip
        filter_probs_kernel[(N * tiles,)](
            logits, logits.stride(0), V, temperature, slots, 0 if slots is None else slots.shape[0],
            temperature.shape[0], rows, *(scratch[name] for name in found), probs, scratch["space"], tiles,
            TILE=TILE, SUB=SUB, MAXIMA=maxima, **OPTIONS,
        )  # fmt: skip
