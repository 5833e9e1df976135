"""`kv_append_slots` in Triton: one launch of one program."""

import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2, workspace
from ._paged_cache import BAD_PAGE, LANES, OUT_OF_PAGES, TABLE_FULL, is_page, row_of

WIDEST = 256  # blocks of a request looked at together


@triton.jit
def _tokens(seq_lens, num_new, slots, b, rows, max_new, inside):
    """(row of the tables, length, number of new tokens) of requests; one that is skipped has none of either."""
    row, there = row_of(slots, b, inside, rows)
    old = tl.maximum(tl.load(seq_lens + row, mask=there, other=0), 0)
    return row, old, tl.minimum(tl.maximum(tl.load(num_new + b, mask=there, other=0), 0), max_new)


@triton.jit
def _page(entry, ref_counts, P, null_page, inside):
    """(page of an entry of the table, whether it is one of the cache's, whether others hold it too)."""
    page = tl.load(entry, mask=inside, other=-1)
    held = inside & is_page(page, P, null_page)
    shared = tl.zeros_like(held)
    if ref_counts is not None:
        shared = held & (tl.load(ref_counts + page, mask=held, other=0) > 1)
    return page, held, shared


@triton.jit(do_not_specialize=["stride", "page_size", "null_page", "B", "rows", "M", "P", "max_new", "most"])
def kv_append_slots_kernel(
    seq_lens, num_new, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, token_slots, copy_src,
    copy_dst, status, queue, stride, B, rows, M, P, max_new, most, BLOCKS: tl.constexpr,
):  # fmt: skip
    """First all requests at once: which of them are refused whatever the others get, and which need a page. A request that
    needs none as the call begins is served in any order, as nobody else changes its table, and its pages' counts only fall. Then
    the others in turn, each with up to BLOCKS blocks at once. Then the slots of all.

    Bytes: 36 a request, its slot four times, up to 8 for each of its `most` blocks and 8 for each of max_new slots.
    """
    lane = tl.arange(0, LANES)
    waiting = tl.zeros([], tl.int32)
    for start in range(0, B, LANES):
        b = start + lane
        inside = b < B
        row, old, asked = _tokens(seq_lens, num_new, slots, b, rows, max_new, inside)
        new = old.to(tl.int64) + asked
        full = (asked > 0) & ((new > 0x7FFFFFFF) | ((new - 1) // page_size >= M))
        first, last = old // page_size, ((new - 1) // page_size).to(tl.int32)
        entries = block_table + row.to(tl.int64) * stride
        fits = inside & (asked > 0) & (full == 0)
        page, held, shared = _page(entries + first, None, P, null_page, fits)
        bad = fits & (old % page_size != 0) & (held == 0)
        fits = fits & (bad == 0)
        needy = tl.zeros_like(fits)
        for w in range(0, most):
            written = fits & (first + w <= last)
            page, held, shared = _page(entries + first + w, ref_counts, P, null_page, written)
            needy = needy | (written & ((held == 0) | shared))
        tl.store(queue + waiting + tl.cumsum(needy.to(tl.int32), 0) - 1, b, mask=needy)
        waiting += tl.sum(needy.to(tl.int32), 0)
        tl.store(status + b, tl.where(full, TABLE_FULL, tl.where(bad, BAD_PAGE, 0)), mask=inside)
        tl.store(copy_src + b, b * 0 - 1, mask=inside)
        tl.store(copy_dst + b, b * 0 - 1, mask=inside)
    top = tl.minimum(tl.maximum(tl.load(num_free), 0), P)
    tl.debug_barrier()  # other warps read the queue

    block = tl.arange(0, BLOCKS)
    for turn in range(0, waiting):
        b = tl.load(queue + turn)
        row, old, asked = _tokens(seq_lens, num_new, slots, b, rows, max_new, b >= 0)
        first = old // page_size
        count = (old + asked - 1) // page_size - first + 1
        entries = block_table + row.to(tl.int64) * stride + first
        needed = tl.zeros([], tl.int32)
        for w in range(0, count, BLOCKS):
            written = w + block < count
            page, held, shared = _page(entries + w + block, ref_counts, P, null_page, written)
            needed += tl.sum((written & ((held == 0) | shared)).to(tl.int32), 0)
        enough = needed <= top
        bad = tl.zeros([], tl.int32)
        for w in range(0, needed, BLOCKS):
            popped = enough & (w + block < needed)
            fresh = tl.load(free_pages + top - 1 - w - block, mask=popped, other=0)
            bad += tl.sum((popped & (is_page(fresh, P, null_page) == 0)).to(tl.int32), 0)
        tl.store(status + b, tl.where(enough, tl.where(bad > 0, BAD_PAGE, 0), OUT_OF_PAGES))
        if enough & (bad == 0):
            for w in range(0, count, BLOCKS):
                written = w + block < count
                page, held, shared = _page(entries + w + block, ref_counts, P, null_page, written)
                taken = written & ((held == 0) | shared)
                rank = tl.cumsum(taken.to(tl.int32), 0)
                fresh = tl.load(free_pages + top - rank, mask=taken, other=0)
                tl.debug_barrier()  # every warp has seen the same table and counts
                tl.store(entries + w + block, fresh, mask=taken)
                if ref_counts is not None:
                    tl.atomic_add(ref_counts + page, block * 0 - 1, mask=shared, sem="relaxed")
                    tl.debug_barrier()
                    tl.store(ref_counts + fresh, block * 0 + 1, mask=taken)
                copied = taken & (w + block == 0) & (old % page_size != 0)
                tl.store(copy_src + b + block, page, mask=copied)
                tl.store(copy_dst + b + block, fresh, mask=copied)
                top -= tl.sum(taken.to(tl.int32), 0)
                tl.debug_barrier()  # before the next ones look
    tl.store(num_free, top)
    tl.debug_barrier()

    total = max_new * (tl.zeros([], tl.int64) + B)
    for start in range(0, total, LANES):
        i = start + lane
        inside = i < total
        b, j = (i // max_new).to(tl.int32), (i % max_new).to(tl.int32)
        row, old, asked = _tokens(seq_lens, num_new, slots, b, rows, max_new, inside)
        there = inside & (j < asked) & (tl.load(status + b, mask=inside, other=0) == 0)
        token = old + j
        page = tl.load(block_table + row.to(tl.int64) * stride + token // page_size, mask=there, other=0)
        slot = page.to(tl.int64) * page_size + token % page_size
        tl.store(token_slots + i, tl.where(there, slot, -1), mask=inside)
    tl.debug_barrier()  # the slots are those past the old lengths

    for start in range(0, B, LANES):
        b = start + lane
        row, old, asked = _tokens(seq_lens, num_new, slots, b, rows, max_new, b < B)
        served = (b < B) & (asked > 0) & (tl.load(status + b, mask=b < B, other=1) == 0)
        tl.store(seq_lens + row, old + asked, mask=served)


def kv_append_slots(
    seq_lens, num_new, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, token_slots, copy_src,
    copy_dst, status,
) -> None:  # fmt: skip
    (B, max_new), (rows, M), P = token_slots.shape, block_table.shape, free_pages.shape[0]
    most = (max_new + page_size - 2) // page_size + 1
    with workspace(0, 0, {}, block_table.device, queue=B) as scratch:
        kv_append_slots_kernel[(1,)](
            seq_lens, num_new, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, token_slots,
            copy_src, copy_dst, status, scratch["queue"], block_table.stride(0), B, rows, M, P, max_new, most,
            BLOCKS=min(power_of_2(most), WIDEST), **OPTIONS,
        )  # fmt: skip
