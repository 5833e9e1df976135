"""`nucleus` in Triton: one launch."""

import triton
import triton.language as tl

from ._launch import OPTIONS, check_vocab, maxima_of, scan_splits, scan_tile, subtile_of, workspace
from ._numerics import INF
from ._row import (
    STATUS_EMPTY_ROW,
    STATUS_NAN,
    finished_scan,
    first_maximum,
    nucleus_of,
    scan_share,
    slot_of,
    space_of,
    temperature_of,
)


@triton.jit(do_not_specialize=["splits", "num_slots", "num_params"])
def nucleus_kernel(
    logits, stride, V, temperature, top_p, top_k, min_p, slots, num_slots, num_params, rows,
    cutoff, row_max, log_mass, status, peak, space, done, splits,
    ORDER: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Program n * splits + s scans the s-th part of row n; the last of a row's programs to be done finds its nucleus.

    Bytes: V logits of a row from memory; 8 V / SUB written and read back from the second-level cache; again from there
    the subtiles that can hold the cutoff, two or three times, some ten subtiles for a language model's row and all of
    them for a flat one (those some ten times). `peak`: also the lowest id of a greedy row's maximum.
    """
    n = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    slot = slot_of(n, rows, slots, num_slots, num_params)
    greedy, _, scale = temperature_of(temperature + slot)
    row = logits + n * stride
    space = space_of(space, n, MAXIMA)
    nan = scan_share(row, V, split, splits, scale, not greedy, space, TILE, SUB, MAXIMA)
    seen, last = finished_scan(done + n, nan, splits)
    if not last:
        return
    c, m, mass = nucleus_of(
        (row, V, None, 0, False), V, greedy, scale,
        tl.load(top_p + slot), tl.load(top_k + slot), tl.load(min_p + slot), space, ORDER, SUB, MAXIMA,
    )  # fmt: skip
    tl.store(cutoff + n, c)
    tl.store(row_max + n, m)
    tl.store(log_mass + n, mass)
    tl.store(status + n, tl.where(seen, STATUS_NAN, 0) | tl.where(m == -INF, STATUS_EMPTY_ROW, 0))
    if peak is not None:
        if greedy:
            tl.store(peak + n, first_maximum(row, V, m, space, SUB, MAXIMA))
    tl.store(done + n, 0)


def launch_nucleus(
    logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status, peak,
    maxima, SUB, space, done,
) -> None:  # fmt: skip
    """Queues the kernel on a workspace that the caller holds."""
    N, V = logits.shape
    splits = scan_splits(N, V, logits.device)
    nucleus_kernel[(N * splits,)](
        logits, logits.stride(0), V, temperature, top_p, top_k, min_p,
        slots, 0 if slots is None else slots.shape[0], temperature.shape[0], rows,
        cutoff, row_max, log_mass, status, peak, space, done, splits,
        ORDER=filter_order, TILE=scan_tile(logits, SUB), SUB=SUB, MAXIMA=maxima, **OPTIONS,
    )  # fmt: skip


def nucleus(
    logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status
) -> None:
    N, V = logits.shape
    check_vocab("nucleus", "logits", V)
    maxima, SUB = maxima_of(V), subtile_of(V)
    with workspace(N, maxima, {"done": N}, logits.device) as scratch:
        launch_nucleus(
            logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status,
            None, maxima, SUB, **scratch,
        )  # fmt: skip
