"""`kv_rollback` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, EVICTED, changing, is_page, release


def kv_rollback(
    seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, window, sinks,
    status,
) -> None:  # fmt: skip
    with changing(slots, seq_lens) as lengths, changing(slots, block_table) as table:
        (M, P), device = (table.shape[1], free_pages.shape[0]), table.device
        old = lengths.long().clamp_min(0)
        rejected = torch.minimum(num_rejected.long().clamp_min(0), old)
        new = old - rejected
        first, last = (-((-tokens) // page_size) for tokens in (new, old))
        refused = torch.zeros_like(rejected, dtype=torch.bool)
        if window:
            reached = ((new - window + 1).clamp_min(0) // page_size).clamp_min(-(-sinks // page_size))
            page = table.gather(1, reached.clamp_max(M - 1)[:, None])[:, 0]
            there = (reached < M) & is_page(page, P, null_page)
            refused = (rejected > 0) & (reached < first) & ~there
        served = (rejected > 0) & ~refused
        lengths.copy_(torch.where(served, new, lengths))
        last = torch.where(served, last, first)

        column = torch.arange(M, device=device)
        cleared = (column >= first[:, None]) & (column < last[:, None])
        if window:
            cleared &= table != null_page
        bits = release(cleared, table, free_pages, num_free, ref_counts, null_page)
        bits |= torch.where((last > first) & (last > M), BAD_PAGE, 0)
        status.copy_(torch.where(refused, EVICTED, bits))


_backends.register_eager("kv_rollback", kv_rollback)
