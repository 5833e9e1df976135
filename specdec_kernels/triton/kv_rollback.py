"""`kv_rollback` in Triton: one launch of one program."""

import torch
import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2, workspace
from ._paged_cache import BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, LANES, blocks


@triton.jit
def _lengths(seq_lens, num_rejected, b, inside):
    """(length before, length after) of requests."""
    old = tl.maximum(tl.load(seq_lens + b, mask=inside, other=0), 0)
    rejected = tl.minimum(tl.maximum(tl.load(num_rejected + b, mask=inside, other=0), 0), old)
    return old, old - rejected


@triton.jit
def _release(i, inside, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half):
    """The i-th release of the call: (its request, its entry in the table, the page there, whether it is one of the cache's).
    `ends` holds how many there are up to each request; its place in them is found by halving, from 2 half >= B."""
    b = i * 0
    step = half
    while step > 0:
        probe = b + step
        end = tl.load(ends + probe - 1, mask=inside & (probe < B), other=0x7FFFFFFF)
        b = tl.where(end <= i, probe, b)
        step = step >> 1
    _, new = _lengths(seq_lens, num_rejected, b, inside)
    block = blocks(new, page_size) + tl.load(ends + b, mask=inside, other=0) - 1 - i
    entry = block_table + b.to(tl.int64) * stride + block
    page = tl.load(entry, mask=inside, other=-1)
    return b, entry, page, inside & (page >= 0) & (page < P)


@triton.jit
def _push(page, gone, b, free_pages, count, P, status):
    """Pushes the pages that are gone, in order; returns the list's count, as if it had room for all."""
    place = count + tl.cumsum(gone.to(tl.int32), 0) - 1
    tl.store(free_pages + place, page, mask=gone & (place < P))
    tl.atomic_or(status + b, b * 0 + FREE_LIST_FULL, mask=gone & (place >= P), sem="relaxed")
    return count + tl.sum(gone.to(tl.int32), 0)


@triton.jit(do_not_specialize=["stride", "page_size", "B", "M", "P", "half"])
def kv_rollback_kernel(
    seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, page_size, status, ends, stride, B, M, P, half
):  # fmt: skip
    """Releases are numbered in the order in which they happen and looked at LANES at a time.

    With counts: all count down; a page that comes to 0 takes the highest number among its releases, as -1 - number, in place of
    its count; that release pushes it and leaves 0. Where a count falls below 0 there were more releases than holders: they are
    taken back and done one by one.

    Bytes: 8 a request, 8 and log2(B) cached reads a release, 12 more with counts.
    """
    lane = tl.arange(0, LANES)
    total = tl.zeros([], tl.int32)
    for start in range(0, B, LANES):
        b = start + lane
        inside = b < B
        old, new = _lengths(seq_lens, num_rejected, b, inside)
        first, last = blocks(new, page_size), blocks(old, page_size)
        cleared = tl.maximum(tl.minimum(last, M) - first, 0)
        tl.store(ends + b, total + tl.cumsum(cleared, 0), mask=inside)
        tl.store(status + b, tl.where((last > first) & (last > M), BAD_PAGE, 0), mask=inside)
        total += tl.sum(cleared, 0)
    count = tl.minimum(tl.maximum(tl.load(num_free), 0), P)
    tl.debug_barrier()  # other warps read the ends and set bits

    overdrawn = tl.zeros([], tl.int32)
    if ref_counts is not None:
        for start in range(0, total, LANES):
            i = start + lane
            b, entry, page, held = _release(
                i, i < total, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half
            )
            tl.atomic_add(ref_counts + page, i * 0 - 1, mask=held, sem="relaxed")
        tl.debug_barrier()
        for start in range(0, total, LANES):
            i = start + lane
            b, entry, page, held = _release(
                i, i < total, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half
            )
            left = tl.load(ref_counts + page, mask=held, other=0)
            overdrawn = tl.maximum(overdrawn, tl.max((left < 0).to(tl.int32), 0))
        tl.debug_barrier()
        for start in range(0, total, LANES):
            i = start + lane
            b, entry, page, held = _release(
                i, i < total, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half
            )
            if overdrawn == 0:
                left = tl.load(ref_counts + page, mask=held, other=1)
                tl.atomic_min(ref_counts + page, -1 - i, mask=held & (left <= 0), sem="relaxed")
            else:
                tl.atomic_add(ref_counts + page, i * 0 + 1, mask=held, sem="relaxed")
        tl.debug_barrier()

    if overdrawn == 0:
        for start in range(0, total, LANES):
            i = start + lane
            inside = i < total
            b, entry, page, held = _release(
                i, inside, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half
            )
            gone = held
            if ref_counts is not None:
                gone = held & (tl.load(ref_counts + page, mask=held, other=0) == -1 - i)
                tl.store(ref_counts + page, i * 0, mask=gone)
            count = _push(page, gone, b, free_pages, count, P, status)
            tl.atomic_or(status + b, i * 0 + BAD_PAGE, mask=inside & (held == 0), sem="relaxed")
            tl.store(entry, i * 0 - 1, mask=inside)
    else:
        if ref_counts is not None:
            for at in range(0, total):
                i = at + lane
                inside = lane == 0
                b, entry, page, held = _release(
                    i, inside, seq_lens, num_rejected, ends, B, block_table, stride, M, P, page_size, half
                )
                before = tl.load(ref_counts + page, mask=held, other=0)
                tl.store(ref_counts + page, before - 1, mask=held & (before >= 1))
                tl.atomic_or(status + b, i * 0 + BAD_REF_COUNT, mask=held & (before < 1), sem="relaxed")
                count = _push(page, held & (before == 1), b, free_pages, count, P, status)
                tl.atomic_or(status + b, i * 0 + BAD_PAGE, mask=inside & (held == 0), sem="relaxed")
                tl.store(entry, i * 0 - 1, mask=inside)
                tl.debug_barrier()
    tl.store(num_free, tl.minimum(count, P))
    tl.debug_barrier()  # all have found their entries, which takes the old lengths

    for start in range(0, B, LANES):
        b = start + lane
        old, new = _lengths(seq_lens, num_rejected, b, b < B)
        tl.store(seq_lens + b, new, mask=(b < B) & (new < old))


def kv_rollback(seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, page_size, status) -> None:
    (B, M), P = block_table.shape, free_pages.shape[0]
    with workspace(0, 0, {}, block_table.device, ends=B) as scratch:
        kv_rollback_kernel[(1,)](
            seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, page_size, status,
            scratch["ends"].view(torch.int32), block_table.stride(0), B, M, P, power_of_2(B) // 2, **OPTIONS,
        )  # fmt: skip
