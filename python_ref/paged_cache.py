"""What the oracles over a paged cache's bookkeeping share: status bits, blocks of a length, releases."""

BAD_PAGE = 1
BAD_REF_COUNT = 2
FREE_LIST_FULL = 4
OUT_OF_PAGES = 8
TABLE_FULL = 16
EVICTED = 32


def blocks(tokens: int, page_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-tokens // page_size)


def release(page: int, free_pages: list[int], num_free: list[int], ref_counts: list[int] | None) -> int:
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
