"""`kv_append_slots` in plain torch."""

import torch

from .. import _backends
from ._paged_cache import BAD_PAGE, OUT_OF_PAGES, TABLE_FULL, changing, is_page, put, rows_of


def kv_append_slots(
    seq_lens, num_new, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, token_slots, copy_src,
    copy_dst, status,
) -> None:  # fmt: skip
    asked = num_new if slots is None else num_new * rows_of(slots, seq_lens.shape[0])[1]
    with changing(slots, seq_lens) as lengths, changing(slots, block_table) as table:
        _append(
            lengths, asked, table, free_pages, num_free, ref_counts, page_size, null_page, token_slots, copy_src, copy_dst,
            status,
        )  # fmt: skip


def _append(
    seq_lens,
    num_new,
    block_table,
    free_pages,
    num_free,
    ref_counts,
    page_size,
    null_page,
    slots,
    copy_src,
    copy_dst,
    status,
) -> None:
    """With a row of the tables for each request of the batch."""
    (B, M), P, max_new, device = block_table.shape, free_pages.shape[0], slots.shape[1], block_table.device
    old = seq_lens.long().clamp_min(0)
    asked = num_new.long().clamp(0, max_new)
    new = old + asked
    first, partial = old // page_size, old % page_size > 0
    # Blocks that a request can write to, and the column of each; the first may be partly filled.
    block = first[:, None] + torch.arange((max_new + page_size - 2) // page_size + 1, device=device)
    column = block.clamp_max(M - 1)
    entry = block_table.long().gather(1, column)
    held = is_page(entry, P, null_page)
    written = (asked > 0)[:, None] & (block * page_size < new[:, None])
    full = (asked > 0) & (new > min(M * page_size, 2**31 - 1))
    bad = written[:, 0] & partial & ~held[:, 0]
    bits = torch.where(full, TABLE_FULL, torch.where(bad, BAD_PAGE, 0))
    source, destination = torch.full_like(old, -1), torch.full_like(old, -1)

    top = num_free.long().clamp(0, P)
    for b in range(B):  # one after another: what is left depends on who was served
        fresh = ~held[b]
        if ref_counts is not None:
            shared = held[b] & (ref_counts[torch.where(held[b], entry[b], 0)] > 1)
            fresh = fresh | shared
        fresh = fresh & written[b] & (bits[b] == 0)
        rank = fresh.cumsum(0)
        enough = rank[-1] <= top
        page = free_pages[(top - rank).clamp(0, P - 1)].long()
        sound = (~fresh | is_page(page, P, null_page)).all()
        taken = fresh & enough & sound
        bits[b] += torch.where(enough, torch.where(sound, 0, BAD_PAGE), OUT_OF_PAGES)[0]
        put(block_table[b], column[b], page, taken)
        if ref_counts is not None:
            left = torch.where(taken & shared, entry[b], 0)
            ref_counts.index_add_(0, left, -(taken & shared).to(torch.int32))
            put(ref_counts, page, 1, taken)
        copied = taken[0] & partial[b]
        source[b] = torch.where(copied, entry[b, 0], -1)
        destination[b] = torch.where(copied, page[0], -1)
        top = top - taken.sum()

    served = (bits == 0) & (asked > 0)
    seq_lens.copy_(torch.where(served, new, seq_lens))
    token = old[:, None] + torch.arange(max_new, device=device)
    page = block_table.long().gather(1, (token // page_size).clamp_max(M - 1))
    there = served[:, None] & (token < new[:, None])
    slots.copy_(torch.where(there, page * page_size + token % page_size, -1))
    for into, value in ((copy_src, source), (copy_dst, destination), (status, bits), (num_free, top)):
        into.copy_(value)


_backends.register_eager("kv_append_slots", kv_append_slots)
