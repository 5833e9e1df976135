"""Pages that a sliding window has left, or that a budget drops, go back to the free list; attention sinks stay.

Releases happen one after another, as those of `kv_rollback`: requests ascending, within a request from its last block to its
first.
"""

from .paged_cache import BAD_PAGE, blocks, release


def kv_evict(
    seq_lens: list[int],
    keep_last: int,
    block_table: list[list[int]],
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    sinks: int = 0,
    ref_counts: list[int] | None = None,
) -> list[int]:
    """Arguments as `specdec_kernels.kv_evict`, as lists and changed in place; returns the status of each request."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    status = [0] * len(seq_lens)
    for b, row in enumerate(block_table):
        # Blocks first .. end - 1 hold neither sinks nor any of the last tokens.
        first, end = blocks(sinks, page_size), max(seq_lens[b] - keep_last, 0) // page_size
        if end > max(first, len(row)):
            status[b] |= BAD_PAGE
        for block in reversed(range(first, min(end, len(row)))):
            if row[block] == -1:  # evicted earlier, and with it all blocks before it
                break
            status[b] |= release(row[block], free_pages, num_free, ref_counts)
            row[block] = -1
    return status
