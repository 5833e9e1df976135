"""`kv_evict` in Triton: one launch of one program."""

import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2, workspace
from ._paged_cache import BAD_PAGE, blocks, release_all, row_of

LOOK = 1024
"""Entries of the table looked at together, four a thread."""


def rows_and_columns(B: int) -> tuple[int, int]:
    """Requests, and entries of each, looked at together. A step evicts a block or two of each, which many requests share a look
    for; at a long prompt's first call, of which there are few at once, every look depends on the one before it."""
    rows = 64 if B > 8 else 8 if B > 1 else 1
    return rows, LOOK // rows


@triton.jit(do_not_specialize=["keep_last", "stride", "page_size", "null_page", "sinks", "B", "rows", "M", "P", "half"])
def kv_evict_kernel(
    seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, sinks, status, ends, tops,
    stride, B, rows, M, P, half, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """First, ROWS requests at once, how many old blocks each still has: its entries from the last old one back to the first
    without a page, COLUMNS at a time. Then the releases.

    Bytes: 16 a request, a slot each, up to 4 * COLUMNS of its table beyond the entries evicted, and what the releases take.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    first = blocks(sinks, page_size)
    total = tl.zeros([], tl.int32)
    for start in range(0, B, ROWS):
        b = start + tl.arange(0, ROWS)
        inside = b < B
        row, there = row_of(slots, b, inside, rows)
        length = tl.maximum(tl.load(seq_lens + row, mask=there, other=0), 0)
        end = tl.maximum(length - keep_last, 0) // page_size
        tl.store(status + b, tl.where(end > tl.maximum(first, M), BAD_PAGE, 0), mask=inside)
        last = tl.minimum(end, M) - 1
        entries = block_table + row.to(tl.int64) * stride
        count = b * 0
        running = there
        while tl.max(running.to(tl.int32), 0) > 0:
            block = (last - count)[:, None] - column
            looked = running[:, None] & (block >= first)
            page = tl.load(entries[:, None] + block, mask=looked, other=null_page)
            seen = tl.min(tl.where(page == null_page, column, COLUMNS), 1)
            count += seen
            running = seen == COLUMNS
        stop = total + tl.cumsum(count, 0)
        tl.store(ends + b, stop, mask=inside)
        tl.store(tops + b, last + stop - count, mask=inside)
        total += tl.sum(count, 0)
    release_all(
        total, ends, tops, slots, B, block_table, stride, free_pages, num_free, ref_counts, P, null_page, status, half,
        False,
    )  # fmt: skip


def kv_evict(
    seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, sinks, status
) -> None:
    B, (rows, M), P = status.shape[0], block_table.shape, free_pages.shape[0]
    at_once, columns = rows_and_columns(B)
    with workspace(0, 0, {}, block_table.device, ends=B, tops=B) as scratch:
        kv_evict_kernel[(1,)](
            seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, sinks, status,
            scratch["ends"], scratch["tops"], block_table.stride(0), B, rows, M, P, power_of_2(B) // 2,
            ROWS=at_once, COLUMNS=columns, **OPTIONS,
        )  # fmt: skip
