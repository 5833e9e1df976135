"""`kv_evict` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, release


def kv_evict(seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, page_size, sinks, status) -> None:
    M = block_table.shape[1]
    first, end = -(-sinks // page_size), (seq_lens.long() - keep_last).clamp_min(0) // page_size
    column = torch.arange(M, device=block_table.device)
    old = (column >= first) & (column < end[:, None])
    # Nothing at or before an entry of -1: entries that are not, counted from a row's last old block.
    over = (old & (block_table == -1)).flip(1).cumsum(1).flip(1) > 0
    bits = release(old & ~over, block_table, free_pages, num_free, ref_counts)
    status.copy_(bits | torch.where(end > max(first, M), BAD_PAGE, 0))


_backends.register_eager("kv_evict", kv_evict)
