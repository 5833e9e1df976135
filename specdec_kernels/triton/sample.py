"""`sample` in Triton: two launches, the nucleus of each row and the race over it."""

import triton
import triton.language as tl

from ._launch import OPTIONS, check_vocab, maxima_of, race_share_of, race_splits, subtile_of, workspace
from ._numerics import INF
from ._race import KIND_LOGITS, column_of, log_probability, race_share, token_of
from ._row import STATUS_EMPTY_ROW, slot_of, space_of, temperature_of
from .nucleus import launch_nucleus


@triton.jit(do_not_specialize=["num_slots", "num_params", "splits", "stream"])
def sample_kernel(
    logits, stride, width, vocab, temperature, seed, slots, num_slots, num_params, position, rows, ids, target_to_draft,
    stream, cutoff, row_max, log_mass, status, tokens, logprobs, space, best, done, splits,
    SUB: tl.constexpr, MAXIMA: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Program n * splits + s races the s-th part of row n; the last of a row's programs to be done writes its outputs.

    Bytes: the subtiles of a row that reach its cutoff, once more; with a map, the whole row.
    """
    n = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    slot = slot_of(n, rows, slots, num_slots, num_params)
    greedy, inverse, scale = temperature_of(temperature + slot)
    c, m, mass = tl.load(cutoff + n), tl.load(row_max + n), tl.load(log_mass + n)
    row = logits + n * stride
    if m > -INF:
        at = tl.zeros([], tl.int64)
        if position is not None:
            at = tl.load(position + n)
        tag = tl.zeros([], tl.int64) + stream
        if ids is not None:
            tag = tag | (tl.load(ids + n).to(tl.int64) << 8)
        key, _ = race_share(
            row, target_to_draft, width, vocab, c, m, inverse, mass, scale, greedy,
            False, None, None, 0, c, m, mass, scale, False, -1, 1.0,
            tl.load(seed + slot), at, tag, space_of(space, n, MAXIMA), split, splits,
            KIND_LOGITS, KIND_LOGITS, SUB, MAXIMA, SHARE,
        )  # fmt: skip
        if key > 0:
            tl.atomic_max(best + n, key, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(done + n, 1) != splits - 1:
        return
    won = tl.load(best + n, cache_modifier=".cg")
    found = won > 0
    token = tl.where(found, token_of(won), 0)
    tl.store(tokens + n, token)
    if not found:
        tl.store(status + n, tl.load(status + n) | STATUS_EMPTY_ROW)
    if logprobs is not None:
        column, inside = column_of(token, target_to_draft, width, found)
        z = tl.load(row + column, mask=inside, other=-INF).to(tl.float32)
        tl.store(logprobs + n, tl.where(greedy & found, 0.0, log_probability(z, c, m, mass, inverse)))
    tl.store(best + n, 0)
    tl.store(done + n, 0)


def sample(
    logits, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft, stream, filter_order,
    tokens, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    N, V = logits.shape
    vocab = V if target_to_draft is None else target_to_draft.shape[0]
    widest = max(V, vocab)
    check_vocab("sample", "logits", V)
    check_vocab("sample", "target_to_draft", vocab)
    maxima, SUB = maxima_of(widest), subtile_of(widest)
    nucleus = {} if cutoff is not None else {"cutoff": N, "row_max": N, "log_mass": N}
    with workspace(N, maxima, {"done": N, "best": N}, logits.device, **nucleus) as scratch:
        if cutoff is None:
            cutoff, row_max, log_mass = (scratch[name] for name in nucleus)
        launch_nucleus(
            logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status,
            None, maxima, SUB, scratch["space"], scratch["done"],
        )  # fmt: skip
        splits = race_splits(N, widest, logits.device)
        # Two blocks a multiprocessor here as well; 112 registers make it spill on sm_120.
        sample_kernel[(N * splits,)](
            logits, logits.stride(0), V, vocab, temperature, seed, slots, 0 if slots is None else slots.shape[0],
            temperature.shape[0], position, rows, ids, target_to_draft, stream, cutoff, row_max, log_mass, status,
            tokens, logprobs, scratch["space"], scratch["best"], scratch["done"], splits,
            SUB=SUB, MAXIMA=maxima, SHARE=race_share_of(widest), **OPTIONS | {"maxnreg": 128},
        )  # fmt: skip
