"""`sample` in Triton: two launches, the nucleus of each row and the race over it."""

import triton
import triton.language as tl

from ._launch import OPTIONS, check_vocab, maxima_of, power_of_2, race_share_of, race_splits, subtile_of, workspace
from ._numerics import INF
from ._race import KIND_LOGITS, column_of, log_probability, race_key, race_share, score_of, token_of
from ._row import STATUS_EMPTY_ROW, slot_of, space_of, temperature_of
from .nucleus import launch_nucleus


@triton.jit(do_not_specialize=["num_slots", "num_params", "splits", "stream"])
def sample_kernel(
    logits, stride, width, vocab, temperature, seed, slots, num_slots, num_params, position, rows, ids, target_to_draft,
    stream, cutoff, row_max, log_mass, status, tokens, logprobs, space, best, done, splits,
    SUB: tl.constexpr, MAXIMA: tl.constexpr, SHARE: tl.constexpr, SAMPLES: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Program n * splits + s races the s-th part of row n; the last of a row's programs to be done writes its outputs. For
    SAMPLES tokens each program keeps as many keys of its part, and the last takes the best of them all.

    Bytes: the subtiles of a row that reach its cutoff, once more for each sample; with a map, the whole row.
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
        x = tl.load(seed + slot)
        own = space_of(space, n, MAXIMA)
        if SAMPLES == 1:
            key, _ = race_share(
                row, target_to_draft, width, vocab, c, m, inverse, mass, scale, greedy,
                False, None, None, 0, c, m, mass, scale, False, -1, 1.0,
                x, at, tag, None, None, 0, own, split, splits, KIND_LOGITS, KIND_LOGITS, SUB, MAXIMA, SHARE,
            )  # fmt: skip
            if key > 0:
                tl.atomic_max(best + n, key, sem="relaxed")
        else:
            low = tl.where(greedy, -INF, c)  # a greedy row's next ones lie below its maximum
            key = tl.zeros([], tl.int64) + 0x7FFFFFFFFFFFFFFF
            for j in range(0, SAMPLES):
                key, _ = race_share(
                    row, target_to_draft, width, vocab, low, m, inverse, mass, scale, greedy,
                    False, None, None, 0, c, m, mass, scale, False, -1, 1.0,
                    x, at, tag, key, None, 0, own, split, splits, KIND_LOGITS, KIND_LOGITS, SUB, MAXIMA, SHARE,
                )  # fmt: skip
                tl.store(best + (n * splits + split) * SAMPLES + j, key)
    tl.debug_barrier()
    if tl.atomic_add(done + n, 1) != splits - 1:
        return
    key = tl.zeros([], tl.int64)
    if SAMPLES == 1:
        key = tl.load(best + n, cache_modifier=".cg")
        tl.store(best + n, tl.zeros([], tl.int64))
    else:
        index = tl.arange(0, PAD)
        mine = index < splits * SAMPLES
        keys = tl.load(best + n * splits * SAMPLES + index, mask=mine, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # all have read them
        tl.store(best + n * splits * SAMPLES + index, tl.zeros([PAD], tl.int64), mask=mine)
        key = tl.max(keys, 0)
        if greedy:  # a maximum that no target id has leaves the row empty
            key = tl.where(
                score_of(key)
                == score_of(race_key(tl.where(m == 0.0, 0.0, m), tl.zeros([], tl.int32), greedy & (not greedy))),
                key,
                0,
            )
    if key == 0:
        tl.store(status + n, tl.load(status + n) | STATUS_EMPTY_ROW)
    for j in range(0, SAMPLES):
        found = key > 0
        token = tl.where(found, token_of(key), tl.where(tl.zeros([], tl.int32) + j > 0, -1, 0))
        tl.store(tokens + n * SAMPLES + j, token)
        if logprobs is not None:
            column, inside = column_of(tl.maximum(token, 0), target_to_draft, width, found)
            z = tl.load(row + column, mask=inside, other=-INF).to(tl.float32)
            log_p = log_probability(z, c, m, mass, inverse)
            log_p = tl.where(greedy, tl.where(tl.zeros([], tl.int32) + j > 0, -INF, 0.0), log_p)
            tl.store(logprobs + n * SAMPLES + j, tl.where(found, log_p, -INF))
        if SAMPLES > 1:
            key = tl.max(tl.where(keys < key, keys, 0), 0)
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
    samples = tokens.shape[1] if tokens.dim() == 2 else 1
    splits = race_splits(N, widest, logits.device)
    counters = {"done": N, "best": N if samples == 1 else N * splits * samples}
    with workspace(N, maxima, counters, logits.device, **nucleus) as scratch:
        if cutoff is None:
            cutoff, row_max, log_mass = (scratch[name] for name in nucleus)
        launch_nucleus(
            logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status,
            None, maxima, SUB, scratch["space"], scratch["done"],
        )  # fmt: skip
        # Two blocks a multiprocessor here as well; 112 registers make it spill on sm_120.
        sample_kernel[(N * splits,)](
            logits, logits.stride(0), V, vocab, temperature, seed, slots, 0 if slots is None else slots.shape[0],
            temperature.shape[0], position, rows, ids, target_to_draft, stream, cutoff, row_max, log_mass, status,
            tokens, logprobs, scratch["space"], scratch["best"], scratch["done"], splits,
            SUB=SUB, MAXIMA=maxima, SHARE=race_share_of(widest), SAMPLES=samples,
            PAD=power_of_2(splits * samples), **OPTIONS | {"maxnreg": 128},
        )  # fmt: skip
