"""What the Triton ops over a paged cache share."""

import triton
import triton.language as tl

from ._launch import WARPS

BAD_PAGE = tl.constexpr(1)
BAD_REF_COUNT = tl.constexpr(2)
FREE_LIST_FULL = tl.constexpr(4)
OUT_OF_PAGES = tl.constexpr(8)
TABLE_FULL = tl.constexpr(16)
EVICTED = tl.constexpr(32)
LANES = tl.constexpr(32 * WARPS)
"""Elements looked at together, one a thread: what a thread stores no other thread of the block has still to read."""


@triton.jit
def blocks(tokens, page_size):
    """Blocks that so many tokens fill or begin."""
    return tokens // page_size + (tokens % page_size != 0).to(tl.int32)


@triton.jit
def is_page(entry, P, null_page):
    """Whether an entry of a block table or a free list is a page of the cache that can be held."""
    return (entry >= 0) & (entry < P) & (entry != null_page)


@triton.jit
def row_of(slots, b, inside, rows):
    """(row of the tables of request b, or 0; whether there is one). `inside`: whether b is a request of the batch."""
    row = b
    if slots is not None:
        slot = tl.load(slots + b, mask=inside, other=-1)
        inside = inside & (slot >= 0) & (slot < rows)
        row = tl.where(inside, slot, 0).to(tl.int32)
    return row, inside


@triton.jit
def _release(i, inside, ends, tops, slots, B, block_table, stride, P, null_page, half):
    """The i-th release of the call: (its request, its entry in the table, the page there, whether it is one of the cache's).
    Its request is found by halving, from 2 half >= B; one that is skipped has no releases."""
    b = i * 0
    step = half
    while step > 0:
        probe = b + step
        end = tl.load(ends + probe - 1, mask=inside & (probe < B), other=0x7FFFFFFF)
        b = tl.where(end <= i, probe, b)
        step = step >> 1
    block = tl.load(tops + b, mask=inside, other=0) - i
    row = b
    if slots is not None:
        row = tl.load(slots + b, mask=inside, other=0)
    entry = block_table + row.to(tl.int64) * stride + block
    page = tl.load(entry, mask=inside, other=-1)
    return b, entry, page, inside & is_page(page, P, null_page)


@triton.jit
def _push(page, gone, b, free_pages, count, P, status):
    """Pushes the pages that are gone, in order; returns the list's count, as if it had room for all."""
    place = count + tl.cumsum(gone.to(tl.int32), 0) - 1
    tl.store(free_pages + place, page, mask=gone & (place < P))
    tl.atomic_or(status + b, b * 0 + FREE_LIST_FULL, mask=gone & (place >= P), sem="relaxed")
    return count + tl.sum(gone.to(tl.int32), 0)


@triton.jit
def _clear(i, inside, entry, bad, b, status, null_page):
    tl.atomic_or(status + b, i * 0 + BAD_PAGE, mask=bad, sem="relaxed")
    tl.store(entry, i * 0 + null_page, mask=inside)


@triton.jit
def release_all(
    total, ends, tops, slots, B, block_table, stride, free_pages, num_free, ref_counts, P, null_page, status, half,
    SKIP: tl.constexpr,
):  # fmt: skip
    """Releases `total` blocks, numbered in the order in which that happens and looked at LANES at a time: those of request b end
    before number ends[b], and number i is block tops[b] - i. A block without a page is BAD_PAGE, but an entry of null_page
    passes where SKIP. The caller has `ends`, `tops` and `status` written; the whole block calls.

    With counts: all count down; a page that comes to 0 takes the highest number among its releases, as -1 - number, in place of
    its count; that release pushes it and leaves 0. Where a count was below 1 already there are more releases than holders: they are
    taken back and done one by one.

    Bytes: 8 and log2(B) cached reads a release, 12 more with counts.
    """
    lane = tl.arange(0, LANES)
    count = tl.minimum(tl.maximum(tl.load(num_free), 0), P)
    tl.debug_barrier()  # other warps read the ends and set bits

    overdrawn = tl.zeros([], tl.int32)
    if ref_counts is not None:
        for start in range(0, total, LANES):
            i = start + lane
            b, entry, page, held = _release(i, i < total, ends, tops, slots, B, block_table, stride, P, null_page, half)
            before = tl.atomic_add(ref_counts + page, i * 0 - 1, mask=held, sem="relaxed")
            overdrawn = tl.maximum(overdrawn, tl.max((held & (before < 1)).to(tl.int32), 0))
        tl.debug_barrier()
        for start in range(0, total, LANES):
            i = start + lane
            b, entry, page, held = _release(i, i < total, ends, tops, slots, B, block_table, stride, P, null_page, half)
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
            b, entry, page, held = _release(i, inside, ends, tops, slots, B, block_table, stride, P, null_page, half)
            gone = held
            if ref_counts is not None:
                gone = held & (tl.load(ref_counts + page, mask=held, other=0) == -1 - i)
                tl.store(ref_counts + page, i * 0, mask=gone)
            count = _push(page, gone, b, free_pages, count, P, status)
            bad = inside & (held == 0)
            if SKIP:
                bad = bad & (page != null_page)
            _clear(i, inside, entry, bad, b, status, null_page)
    else:
        if ref_counts is not None:
            for at in range(0, total):
                i = at + lane
                inside = lane == 0
                b, entry, page, held = _release(
                    i, inside, ends, tops, slots, B, block_table, stride, P, null_page, half
                )
                before = tl.load(ref_counts + page, mask=held, other=0)
                tl.store(ref_counts + page, before - 1, mask=held & (before >= 1))
                tl.atomic_or(status + b, i * 0 + BAD_REF_COUNT, mask=held & (before < 1), sem="relaxed")
                count = _push(page, held & (before == 1), b, free_pages, count, P, status)
                bad = inside & (held == 0)
                if SKIP:
                    bad = bad & (page != null_page)
                _clear(i, inside, entry, bad, b, status, null_page)
                tl.debug_barrier()
    tl.store(num_free, tl.minimum(count, P))
