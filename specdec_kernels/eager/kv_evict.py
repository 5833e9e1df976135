"""`kv_evict` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, batch_of, changing, release


def kv_evict(
    seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, sinks, status
) -> None:
    M, lengths = block_table.shape[1], batch_of(slots, seq_lens)
    first, end = -(-sinks // page_size), (lengths.long() - keep_last).clamp_min(0) // page_size
    column = torch.arange(M, device=block_table.device)
    old = (column >= first) & (column < end[:, None])
    with changing(slots, block_table) as table:
        # Nothing at or before an entry without a page: entries that have none, counted from a row's last old block.
        over = (old & (table == null_page)).flip(1).cumsum(1).flip(1) > 0
        bits = release(old & ~over, table, free_pages, num_free, ref_counts, null_page)
    status.copy_(bits | torch.where(end > max(first, M), BAD_PAGE, 0))


_backends.register_eager("kv_evict", kv_evict)
