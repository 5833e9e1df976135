"""What the oracles over a paged cache's bookkeeping share: status bits, blocks of a length, pages, requests, releases."""

BAD_PAGE = 1
BAD_REF_COUNT = 2
FREE_LIST_FULL = 4
OUT_OF_PAGES = 8
TABLE_FULL = 16
EVICTED = 32


def blocks(tokens: int, page_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-tokens // page_size)


def is_page(entry: int, pages: int, null_page: int) -> bool:
    """Whether an entry of a block table or a free list is a page of the cache that can be held: `null_page`, where it is one
    of the cache's, never is."""
    return 0 <= entry < pages and entry != null_page


def requests(slots: list[int] | None, rows: int) -> list[tuple[int, int]]:
    """(b, row of the tables) of each request of the batch, in its order; those whose slot is no row are skipped."""
    return [(b, row) for b, row in enumerate(range(rows) if slots is None else slots) if 0 <= row < rows]


def release(
    page: int, free_pages: list[int], num_free: list[int], ref_counts: list[int] | None, null_page: int = -1
) -> int:
    """One holder lets `page` go; returns status bits."""
    if not is_page(page, len(free_pages), null_page):
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
