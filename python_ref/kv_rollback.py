"""Rejected tokens leave a paged cache: lengths shrink, pages that nobody needs any more go back to the free list.

Releases happen one after another: requests ascending, within a request from its last block to its first, so that the next pops
give them back first to last.
"""

from .paged_cache import BAD_PAGE, EVICTED, blocks, is_page, release, requests


def kv_rollback(
    seq_lens: list[int],
    num_rejected: list[int],
    block_table: list[list[int]],
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    ref_counts: list[int] | None = None,
    window: int | None = None,
    sinks: int = 0,
    slots: list[int] | None = None,
    null_page: int = -1,
) -> list[int]:
    """Arguments as `specdec_kernels.kv_rollback`, as lists and changed in place; returns the status of each request."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    status = [0] * len(num_rejected)
    for b, r in requests(slots, len(block_table)):
        row = block_table[r]
        old = max(seq_lens[r], 0)
        rejected = min(max(num_rejected[b], 0), old)
        if rejected == 0:
            continue
        new = old - rejected
        if window is not None and _reaches_evicted(row, new, page_size, len(free_pages), window, sinks, null_page):
            status[b] = EVICTED
            continue
        seq_lens[r] = new
        for block in reversed(range(blocks(new, page_size), blocks(old, page_size))):
            if block >= len(row):
                status[b] |= BAD_PAGE
                continue
            if window is None or row[block] != null_page:
                status[b] |= release(row[block], free_pages, num_free, ref_counts, null_page)
            row[block] = null_page
    return status


def _reaches_evicted(
    row: list[int], new: int, page_size: int, pages: int, window: int, sinks: int, null_page: int
) -> bool:
    """Whether a request of `new` tokens needs a block that is gone: one that its next token reads, which is at position `new`
    and reads from new - window + 1 on, or the partly filled one that the token is written to.

    One entry tells. Blocks below s = ceil(sinks / page_size) are never evicted, and `kv_evict` leaves no gap: what is gone is
    s .. e - 1 for some e. The blocks needed, sinks apart, are the `reached`-th below and those behind it (with a window of 1 it
    is the partly filled one, if any; the bound by s skips blocks that the sinks keep, the sinks' own last one included). So
    something needed is gone exactly if reached < e. Nothing is needed where `reached` is past the last block: n = 0, sinks that
    cover the text, a window of 1 at a page's end. An entry that is no page, or past the table's columns, cannot be read either.
    """
    reached = max(max(new - window + 1, 0) // page_size, blocks(sinks, page_size))
    if reached >= blocks(new, page_size):
        return False
    return reached >= len(row) or not is_page(row[reached], pages, null_page)
