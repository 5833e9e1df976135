"""`kv_rollback` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, put


def kv_rollback(seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, page_size, status) -> None:
    (B, M), P, device = block_table.shape, free_pages.shape[0], block_table.device
    old = seq_lens.long().clamp_min(0)
    rejected = torch.minimum(num_rejected.long().clamp_min(0), old)
    new = old - rejected
    first, last = (-((-tokens) // page_size) for tokens in (new, old))
    past = (last > first) & (last > M)
    seq_lens.copy_(torch.where(rejected > 0, new, seq_lens))

    # From here on flat, in the order of the releases: a row's last column first.
    column = torch.arange(M - 1, -1, -1, device=device)
    cleared = (column >= first[:, None]) & (column < last[:, None])
    page = block_table.flip(1).long().flatten()
    released = cleared.flatten() & (page >= 0) & (page < P)
    bits = torch.where(cleared.flatten() & ~released, BAD_PAGE, 0)
    page = torch.where(released, page, 0)
    block_table.masked_fill_(cleared.flip(1), -1)

    gone = released
    if ref_counts is not None:
        # How many releases of the same page come before: its place among equal ones in a stable sort.
        ordered, order = torch.where(released, page, P).sort(stable=True)
        at = torch.arange(B * M, device=device)
        begins = torch.where(ordered == ordered.roll(1), 0, at)
        rank = torch.empty_like(at).scatter_(0, order, at - begins.cummax(0).values)
        count = ref_counts[page]
        bits += torch.where(released & (rank >= count), BAD_REF_COUNT, 0)
        gone = released & (rank == count - 1)
        ref_counts.index_add_(0, page, -(released & (rank < count)).to(torch.int32))

    place = num_free.long().clamp(0, P) + gone.long().cumsum(0) - 1
    fits = gone & (place < P)
    bits += torch.where(gone & ~fits, FREE_LIST_FULL, 0)
    put(free_pages, place, page, fits)
    num_free.copy_(num_free.long().clamp(0, P) + fits.sum())
    seen = torch.where(past, BAD_PAGE, 0)
    for bit in (BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL):
        seen |= torch.where(((bits & bit) != 0).view(B, M).any(1), bit, 0)
    status.copy_(seen)


_backends.register_eager("kv_rollback", kv_rollback)
