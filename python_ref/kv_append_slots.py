"""Where the next tokens of each request go in a paged cache, and the pages for them.

Requests are served one after another. Each gets all that it asks for or nothing: one that does not fit leaves its pages to
those behind it.
"""

from typing import NamedTuple

from .paged_cache import BAD_PAGE, OUT_OF_PAGES, TABLE_FULL, blocks, is_page, requests


class AppendOutput(NamedTuple):
    """Fields as those of `specdec_kernels.AppendOutput`, as lists."""

    slots: list[list[int]]
    copy_src: list[int]
    copy_dst: list[int]
    status: list[int]


def kv_append_slots(
    seq_lens: list[int],
    num_new: list[int],
    block_table: list[list[int]],
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    max_new: int,
    ref_counts: list[int] | None = None,
    slots: list[int] | None = None,
    null_page: int = -1,
) -> AppendOutput:
    """Arguments as `specdec_kernels.kv_append_slots`, as lists and changed in place."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    B = len(num_new)
    out = AppendOutput([[-1] * max_new for _ in range(B)], [-1] * B, [-1] * B, [0] * B)
    for b, r in requests(slots, len(block_table)):
        row, old, asked = block_table[r], max(seq_lens[r], 0), min(max(num_new[b], 0), max_new)
        status, source, destination = 0, -1, -1
        if asked > 0:
            status, source, destination = _reserve(
                row, old, old + asked, free_pages, num_free, page_size, ref_counts, null_page
            )
        served = 0 if status else asked
        if served > 0:
            seq_lens[r] = old + served
        for j in range(served):
            out.slots[b][j] = row[(old + j) // page_size] * page_size + (old + j) % page_size
        out.copy_src[b], out.copy_dst[b], out.status[b] = source, destination, status
    return out


def _reserve(
    row: list[int],
    old: int,
    new: int,
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    ref_counts: list[int] | None,
    null_page: int,
) -> tuple[int, int, int]:
    """Pages for the tokens old .. new - 1 of one request; returns (status, page to copy from, page to copy to)."""

    def held(entry: int) -> bool:
        return is_page(entry, len(free_pages), null_page)

    if new > min(len(row) * page_size, 2**31 - 1):
        return TABLE_FULL, -1, -1
    first, partial = old // page_size, old % page_size > 0
    if partial and not held(row[first]):
        return BAD_PAGE, -1, -1

    # Blocks that will be written and have no page yet, or one that others hold too.
    fresh = [
        block
        for block in range(first, blocks(new, page_size))
        if not held(row[block]) or (ref_counts is not None and ref_counts[row[block]] > 1)
    ]
    if len(fresh) > num_free[0]:
        return OUT_OF_PAGES, -1, -1
    popped = free_pages[num_free[0] - len(fresh) : num_free[0]][::-1]
    if not all(map(held, popped)):
        return BAD_PAGE, -1, -1

    source, destination = -1, -1
    num_free[0] -= len(fresh)
    for block, page in zip(fresh, popped, strict=True):
        before, row[block] = row[block], page
        if ref_counts is not None:
            if held(before):
                ref_counts[before] -= 1
            ref_counts[page] = 1
        if partial and block == first:
            source, destination = before, page
    return 0, source, destination
