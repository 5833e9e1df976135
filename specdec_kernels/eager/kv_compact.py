"""`kv_compact` in plain torch."""

import torch

from .. import _backends
from ._moves import bits, only
from ._paged_cache import is_page


def _place(position, block_table, slots, pages, page_size, null_page):
    """(page, offset, whether they are there) of logical positions [B, K]."""
    if block_table is None:
        rows = torch.arange(position.shape[0], device=position.device) if slots is None else slots.long()
        page, offset = rows[:, None].expand_as(position), position
    else:
        block, offset = position // page_size, position % page_size
        width = block_table.shape[1]
        page = block_table.long().gather(1, block.clamp(0, width - 1))
        page = torch.where((block >= 0) & (block < width), page, -1)
    return page, offset, is_page(page, pages, null_page) & (offset >= 0) & (offset < page_size)


def kv_compact(caches, path, seq_lens, block_table, slots, null_page) -> None:
    pages, page_size = caches[0].shape[:2]
    node, root = path.long(), seq_lens.long()[:, None]
    place = torch.arange(1, path.shape[1] + 1, device=path.device)
    before = torch.nn.functional.pad(node[:, :-1], (1, 0))
    source_page, source, is_there = _place(root + node, block_table, slots, pages, page_size, null_page)
    page, offset, has_place = _place(root + place, block_table, slots, pages, page_size, null_page)
    moves = (node > before) & (node > place) & is_there & has_place
    source_page, source, page, offset = only(
        moves.flatten(), *(t.flatten() for t in (source_page, source, page, offset))
    )
    for cache in map(bits, caches):
        cache[page, offset] = cache[source_page, source]  # all are read before any is written


_backends.register_eager("kv_compact", kv_compact)
