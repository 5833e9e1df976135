"""`kv_scrub` in plain torch. Nothing may wait for the count of what was pushed, so as many pages are written as a call can push:
the first one that was pushed again and again in place of those that were not."""

import torch

from .. import _backends
from ._moves import bits, only
from ._paged_cache import batch_of, is_page


def kv_scrub(
    caches, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page
) -> None:
    P, page_size, device = free_pages.shape[0], caches[0].shape[1], free_pages.device
    caches = [bits(cache) for cache in caches]
    start, end = before.long().clamp(0, P), num_free.long().clamp(0, P)
    place = start + torch.arange(P if block_table is None else min(P, block_table.numel()), device=device)
    page = free_pages[place.clamp_max(P - 1)].long()
    pushed = (place < end) & is_page(page, P, null_page)
    (page,) = only(pushed, page)
    for cache in caches:
        cache[page] = torch.where(pushed.any(), 0, cache[page[:1]])

    if block_table is None:
        return
    new, table, M = batch_of(slots, seq_lens).long(), batch_of(slots, block_table), block_table.shape[1]
    block, kept = new // page_size, new % page_size
    page = table.gather(1, block.clamp(0, M - 1)[:, None])[:, 0].long()
    cut = (num_rejected > 0) & (new > 0) & (kept > 0) & (block < M) & is_page(page, P, null_page)
    if ref_counts is not None:
        cut = cut & (ref_counts[torch.where(cut, page, 0)] <= 1)
    page, kept = only(cut, page, kept)
    # Requests with one page between them, in a table that is not sound, write the same there.
    kept = torch.where(page[:, None] == page, kept, page_size).min(1).values
    past = (torch.arange(page_size, device=device) >= kept[:, None]) & cut.any()
    for cache in caches:
        cache[page] = torch.where(past.view(*past.shape, *[1] * (cache.dim() - 2)), 0, cache[page])


_backends.register_eager("kv_scrub", kv_scrub)
