"""What the plain-torch ops over a paged cache share."""

import torch
from torch import Tensor

from ..status import CacheStatus

BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, OUT_OF_PAGES, TABLE_FULL, EVICTED = (int(bit) for bit in CacheStatus)


def put(target: Tensor, index: Tensor, value: Tensor | int, where: Tensor) -> None:
    """target[index] = value where `where`, one value an element, and nothing elsewhere, without waiting for the device to
    count what is written."""
    index = torch.where(where, index, 0)
    target.index_add_(0, index, torch.where(where, value - target[index], 0).to(target.dtype))


def release(cleared: Tensor, block_table: Tensor, free_pages: Tensor, num_free: Tensor, ref_counts) -> Tensor:
    """Releases the blocks where `cleared` [B, M], requests ascending, each from its last block to its first, and clears their
    entries; returns status bits [B]."""
    (B, M), P, device = block_table.shape, free_pages.shape[0], block_table.device
    # Flat, in the order of the releases: a row's last column first.
    asked = cleared.flip(1).flatten()
    page = block_table.flip(1).long().flatten()
    released = asked & (page >= 0) & (page < P)
    bits = torch.where(asked & ~released, BAD_PAGE, 0)
    page = torch.where(released, page, 0)
    block_table.masked_fill_(cleared, -1)

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
    seen = torch.zeros(B, dtype=torch.int64, device=device)
    for bit in (BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL):
        seen |= torch.where(((bits & bit) != 0).view(B, M).any(1), bit, 0)
    return seen
