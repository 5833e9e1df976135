"""Where the next tokens of each request go in a paged cache, and the pages for them.

Requests are served one after another. Each gets all that it asks for or nothing: one that does not fit leaves its pages to
those behind it.
"""

from typing import NamedTuple

from .paged_cache import BAD_PAGE, OUT_OF_PAGES, TABLE_FULL, blocks


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
) -> AppendOutput:
    """Arguments as `specdec_kernels.kv_append_slots`, as lists and changed in place."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    out = AppendOutput([], [], [], [])
    for b, row in enumerate(block_table):
        old, asked = max(seq_lens[b], 0), min(max(num_new[b], 0), max_new)
        status, source, destination = 0, -1, -1
        if asked > 0:
            status, source, destination = _reserve(row, old, old + asked, free_pages, num_free, page_size, ref_counts)
        served = 0 if status else asked
        if served > 0:
            seq_lens[b] = old + served
        slots = [row[t // page_size] * page_size + t % page_size for t in range(old, old + served)]
        out.slots.append(slots + [-1] * (max_new - served))
        out.copy_src.append(source)
        out.copy_dst.append(destination)
        out.status.append(status)
    return out


def _reserve(
    row: list[int],
    old: int,
    new: int,
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    ref_counts: list[int] | None,
) -> tuple[int, int, int]:
    """Pages for the tokens old .. new - 1 of one request; returns (status, page to copy from, page to copy to)."""

    def is_page(page: int) -> bool:
        return 0 <= page < len(free_pages)

    if new > min(len(row) * page_size, 2**31 - 1):
        return TABLE_FULL, -1, -1
    first, partial = old // page_size, old % page_size > 0
    if partial and not is_page(row[first]):
        return BAD_PAGE, -1, -1

    # Blocks that will be written and have no page yet, or one that others hold too.
    fresh = [
        block
        for block in range(first, blocks(new, page_size))
        if not is_page(row[block]) or (ref_counts is not None and ref_counts[row[block]] > 1)
    ]
    if len(fresh) > num_free[0]:
        return OUT_OF_PAGES, -1, -1
    popped = free_pages[num_free[0] - len(fresh) : num_free[0]][::-1]
    if not all(map(is_page, popped)):
        return BAD_PAGE, -1, -1

    source, destination = -1, -1
    num_free[0] -= len(fresh)
    for block, page in zip(fresh, popped, strict=True):
        before, row[block] = row[block], page
        if ref_counts is not None:
            if is_page(before):
                ref_counts[before] -= 1
            ref_counts[page] = 1
        if partial and block == first:
            source, destination = before, page
    return 0, source, destination
