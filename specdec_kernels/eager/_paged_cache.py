"""What the plain-torch ops over a paged cache share."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..status import CacheStatus

BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, OUT_OF_PAGES, TABLE_FULL, EVICTED = (int(bit) for bit in CacheStatus)


def put(target: Tensor, index: Tensor, value: Tensor | int, where: Tensor) -> None:
    """target[index] = value where `where`, one value an element or a row, and nothing elsewhere, without waiting for the device
    to count what is written: the first that is written stands in for those that are not, or what is there already."""
    if not isinstance(value, Tensor):
        value = torch.full_like(index, value)
    first, some = where.int().argmax(0, keepdim=True), where.any()
    index = torch.where(where, index, torch.where(some, index[first], 0))
    where = where.view(-1, *[1] * (target.dim() - 1))
    value = torch.where(where, value.to(target.dtype), torch.where(some, value[first].to(target.dtype), target[:1]))
    target.index_copy_(0, index, value)


def is_page(entry: Tensor, P: int, null_page: int) -> Tensor:
    """Whether entries of a block table or a free list are pages of the cache that can be held."""
    return (entry >= 0) & (entry < P) & (entry != null_page)


def rows_of(slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row of the tables, or 0; whether there is one) of each request of the batch."""
    there = (slots >= 0) & (slots < rows)
    return torch.where(there, slots, 0).long(), there


def batch_of(slots: Tensor | None, table: Tensor) -> Tensor:
    """The batch's rows of `table`, zeros for a request that is skipped; `table` itself without `slots`."""
    if slots is None:
        return table
    row, there = rows_of(slots, table.shape[0])
    return torch.where(there.view(-1, *[1] * (table.dim() - 1)), table[row], 0)


@contextlib.contextmanager
def changing(slots: Tensor | None, table: Tensor) -> Iterator[Tensor]:
    """The same, to be changed in place: what is a copy is written back at the end."""
    batch = batch_of(slots, table)
    yield batch
    if slots is not None:
        row, there = rows_of(slots, table.shape[0])
        put(table, row, batch, there)


def release(
    cleared: Tensor, block_table: Tensor, free_pages: Tensor, num_free: Tensor, ref_counts, null_page: int
) -> Tensor:
    """Releases the blocks where `cleared` [B, M], requests ascending, each from its last block to its first, and clears their
    entries; returns status bits [B]."""
    (B, M), P, device = block_table.shape, free_pages.shape[0], block_table.device
    # Flat, in the order of the releases: a row's last column first.
    asked = cleared.flip(1).flatten()
    page = block_table.flip(1).long().flatten()
    released = asked & is_page(page, P, null_page)
    bits = torch.where(asked & ~released, BAD_PAGE, 0)
    page = torch.where(released, page, 0)
    block_table.masked_fill_(cleared, null_page)

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
