"""`kv_evict` in Triton: one launch of one program."""

import torch
import triton
import triton.language as tl

from ._launch import OPTIONS, WARPS, power_of_2, workspace
from ._paged_cache import BAD_PAGE, blocks, release_all

ROWS = tl.constexpr(8 * WARPS)
COLUMNS = tl.constexpr(16)
"""Requests, and entries of each, looked at together: a step evicts a block or two, a prompt's first call many."""


@triton.jit(do_not_specialize=["keep_last", "stride", "page_size", "sinks", "B", "M", "P", "half"])
def kv_evict_kernel(
    seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, page_size, sinks, status, ends, tops,
    stride, B, M, P, half,
):  # fmt: skip
    """First, ROWS requests at once, how many old blocks each still has: its entries from the last old one back to the first that
    is -1, COLUMNS at a time. Then the releases.

    Bytes: 16 a request, up to 64 of its table beyond the entries evicted, and what the releases take.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    first = blocks(sinks, page_size)
    total = tl.zeros([], tl.int32)
    for start in range(0, B, ROWS):
        b = start + tl.arange(0, ROWS)
        inside = b < B
        length = tl.maximum(tl.load(seq_lens + b, mask=inside, other=0), 0)
        end = tl.maximum(length - keep_last, 0) // page_size
        tl.store(status + b, tl.where(end > tl.maximum(first, M), BAD_PAGE, 0), mask=inside)
        last = tl.minimum(end, M) - 1
        row = block_table + b.to(tl.int64) * stride
        count = b * 0
        running = inside
        while tl.max(running.to(tl.int32), 0) > 0:
            block = (last - count)[:, None] - column
            looked = running[:, None] & (block >= first)
            page = tl.load(row[:, None] + block, mask=looked, other=-1)
            seen = tl.min(tl.where(page == -1, column, COLUMNS), 1)
            count += seen
            running = seen == COLUMNS
        stop = total + tl.cumsum(count, 0)
        tl.store(ends + b, stop, mask=inside)
        tl.store(tops + b, last + stop - count, mask=inside)
        total += tl.sum(count, 0)
    release_all(total, ends, tops, B, block_table, stride, free_pages, num_free, ref_counts, P, status, half, False)


def kv_evict(seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, page_size, sinks, status) -> None:
    (B, M), P = block_table.shape, free_pages.shape[0]
    with workspace(0, 0, {}, block_table.device, ends=B, tops=B) as scratch:
        kv_evict_kernel[(1,)](
            seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, page_size, sinks, status,
            scratch["ends"].view(torch.int32), scratch["tops"].view(torch.int32), block_table.stride(0), B, M, P,
            power_of_2(B) // 2, **OPTIONS,
        )  # fmt: skip
