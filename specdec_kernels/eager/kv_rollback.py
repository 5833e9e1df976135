"""`kv_rollback` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, EVICTED, release


def kv_rollback(
    seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, page_size, window, sinks, status
) -> None:
    (M, P), device = (block_table.shape[1], free_pages.shape[0]), block_table.device
    old = seq_lens.long().clamp_min(0)
    rejected = torch.minimum(num_rejected.long().clamp_min(0), old)
    new = old - rejected
    first, last = (-((-tokens) // page_size) for tokens in (new, old))
    refused = torch.zeros_like(rejected, dtype=torch.bool)
    if window:
        reached = ((new - window + 1).clamp_min(0) // page_size).clamp_min(-(-sinks // page_size))
        page = block_table.gather(1, reached.clamp_max(M - 1)[:, None])[:, 0]
        there = (reached < M) & (page >= 0) & (page < P)
        refused = (rejected > 0) & (reached < first) & ~there
    served = (rejected > 0) & ~refused
    seq_lens.copy_(torch.where(served, new, seq_lens))
    last = torch.where(served, last, first)

    column = torch.arange(M, device=device)
    cleared = (column >= first[:, None]) & (column < last[:, None])
    if window:
        cleared &= block_table != -1
    bits = release(cleared, block_table, free_pages, num_free, ref_counts)
    bits |= torch.where((last > first) & (last > M), BAD_PAGE, 0)
    status.copy_(torch.where(refused, EVICTED, bits))


_backends.register_eager("kv_rollback", kv_rollback)
