"""Pages that a sliding window has left, or that a budget drops, go back to the free list; attention sinks stay.

Releases happen one after another, as those of `kv_rollback`: requests ascending, within a request from its last block to its
first.
"""

from .paged_cache import BAD_PAGE, blocks, release, requests


def kv_evict(
    seq_lens: list[int],
    keep_last: int,
    block_table: list[list[int]],
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    sinks: int = 0,
    ref_counts: list[int] | None = None,
    slots: list[int] | None = None,
    null_page: int = -1,
) -> list[int]:
    """Arguments as `specdec_kernels.kv_evict`, as lists and changed in place; returns the status of each request."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    status = [0] * len(seq_lens if slots is None else slots)
    for b, r in requests(slots, len(block_table)):
        row = block_table[r]
        # Blocks first .. end - 1 hold neither sinks nor any of the last tokens.
        first, end = blocks(sinks, page_size), max(seq_lens[r] - keep_last, 0) // page_size
        if end > max(first, len(row)):
            status[b] |= BAD_PAGE
        for block in reversed(range(first, min(end, len(row)))):
            if row[block] == null_page:  # evicted earlier, and with it all blocks before it
                break
            status[b] |= release(row[block], free_pages, num_free, ref_counts, null_page)
            row[block] = null_page
    return status
