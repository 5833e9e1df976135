"""What a rollback let go of becomes zero: pages that went back to the free list, slots past the new end of a page."""

from torch import Tensor

from .paged_cache import is_page, requests


def kv_scrub(
    caches: list[Tensor],
    free_pages: list[int],
    before: list[int],
    num_free: list[int],
    seq_lens: list[int] | None = None,
    num_rejected: list[int] | None = None,
    block_table: list[list[int]] | None = None,
    ref_counts: list[int] | None = None,
    slots: list[int] | None = None,
    null_page: int = -1,
) -> list[Tensor]:
    """The bookkeeping as `python_ref.kv_rollback` left it and, in `before`, the free list's count from before it. The caches
    are left alone and copies returned. Without `seq_lens`, `num_rejected` and `block_table` only pages are looked for."""
    copies = [cache.clone() for cache in caches]
    for copy in copies:
        places = pushed(free_pages, before[0], num_free[0], null_page)
        if seq_lens is not None and num_rejected is not None and block_table is not None:
            places += cut(
                seq_lens, num_rejected, block_table, len(free_pages), copy.shape[1], ref_counts, slots, null_page
            )
        for page, first in places:
            copy[page, first:] = 0
    return copies


def pushed(free_pages: list[int], before: int, num_free: int, null_page: int) -> list[tuple[int, int]]:
    """(page, its first slot to be zeroed) of those that lie on the list above the first `before`: all of each."""
    P = len(free_pages)
    first, last = (min(max(count, 0), P) for count in (before, num_free))
    return [(page, 0) for page in free_pages[first:last] if is_page(page, P, null_page)]


def cut(
    seq_lens: list[int],
    num_rejected: list[int],
    block_table: list[list[int]],
    P: int,
    page_size: int,
    ref_counts: list[int] | None,
    slots: list[int] | None,
    null_page: int,
) -> list[tuple[int, int]]:
    """The same of the pages that requests with rejected tokens still hold a part of, where nobody else holds them."""
    places = []
    for b, r in requests(slots, len(block_table)):
        length, row = seq_lens[r], block_table[r]
        block, first = divmod(length, page_size)
        if num_rejected[b] <= 0 or length <= 0 or first == 0 or block >= len(row):
            continue
        page = row[block]
        if is_page(page, P, null_page) and (ref_counts is None or ref_counts[page] <= 1):
            places.append((page, first))
    return places
