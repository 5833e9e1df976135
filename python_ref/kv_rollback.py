"""Rejected tokens leave a paged cache: lengths shrink, pages that nobody needs any more go back to the free list.

Releases happen one after another: requests ascending, within a request from its last block to its first, so that the next pops
give them back first to last.
"""

from .paged_cache import BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, blocks


def kv_rollback(
    seq_lens: list[int],
    num_rejected: list[int],
    block_table: list[list[int]],
    free_pages: list[int],
    num_free: list[int],
    page_size: int,
    ref_counts: list[int] | None = None,
) -> list[int]:
    """Arguments as `specdec_kernels.kv_rollback`, as lists and changed in place; returns the status of each request."""
    num_free[0] = min(max(num_free[0], 0), len(free_pages))
    status = [0] * len(seq_lens)
    for b, seq_len in enumerate(seq_lens):
        old = max(seq_len, 0)
        rejected = min(max(num_rejected[b], 0), old)
        if rejected == 0:
            continue
        seq_lens[b] = old - rejected
        for block in reversed(range(blocks(old - rejected, page_size), blocks(old, page_size))):
            if block >= len(block_table[b]):
                status[b] |= BAD_PAGE
                continue
            status[b] |= _release(block_table[b][block], free_pages, num_free, ref_counts)
            block_table[b][block] = -1
    return status


def _release(page: int, free_pages: list[int], num_free: list[int], ref_counts: list[int] | None) -> int:
    """One holder lets `page` go; returns status bits."""
    if not 0 <= page < len(free_pages):
        return BAD_PAGE
    if ref_counts is not None:
        if ref_counts[page] < 1:
            return BAD_REF_COUNT
        ref_counts[page] -= 1
        if ref_counts[page] > 0:
            return 0
    if num_free[0] == len(free_pages):
        return FREE_LIST_FULL
    free_pages[num_free[0]] = page
    num_free[0] += 1
    return 0
