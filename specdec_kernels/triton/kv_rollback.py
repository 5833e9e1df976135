"""`kv_rollback` in Triton: one launch of one program."""

import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2, workspace
from ._paged_cache import BAD_PAGE, EVICTED, LANES, blocks, is_page, release_all, row_of


@triton.jit
def _reaches_evicted(entries, new, first, page_size, window, sinks, M, P, null_page, inside):
    """Whether requests of `new` tokens, in `first` blocks, need one that was evicted. Those that are gone have no gap and begin
    where the sinks end, so the first one needed tells; python_ref/kv_rollback.py says why."""
    reached = tl.maximum(tl.maximum(new - window + 1, 0) // page_size, blocks(sinks, page_size))
    needed = inside & (reached < first)
    page = tl.load(entries + reached, mask=needed & (reached < M), other=-1)
    return needed & (is_page(page, P, null_page) == 0)


@triton.jit(do_not_specialize=["stride", "page_size", "null_page", "window", "sinks", "B", "rows", "M", "P", "half"])
def kv_rollback_kernel(
    seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, window, sinks, status,
    ends, tops, stride, B, rows, M, P, half, WINDOWED: tl.constexpr,
):  # fmt: skip
    """First all requests at once: their lengths, and which blocks each releases. Then the releases.

    Bytes: 24 a request, 4 more with a window, a slot each, and what the releases take.
    """
    lane = tl.arange(0, LANES)
    total = tl.zeros([], tl.int32)
    for start in range(0, B, LANES):
        b = start + lane
        inside = b < B
        row, there = row_of(slots, b, inside, rows)
        old = tl.maximum(tl.load(seq_lens + row, mask=there, other=0), 0)
        rejected = tl.minimum(tl.maximum(tl.load(num_rejected + b, mask=there, other=0), 0), old)
        new = old - rejected
        first, last = blocks(new, page_size), blocks(old, page_size)
        bits = tl.where((last > first) & (last > M), BAD_PAGE, 0)
        shorter = there & (rejected > 0)
        if WINDOWED:
            entries = block_table + row.to(tl.int64) * stride
            refused = _reaches_evicted(entries, new, first, page_size, window, sinks, M, P, null_page, shorter)
            bits = tl.where(refused, EVICTED, bits)
            last = tl.where(refused, first, last)
            shorter = shorter & (refused == 0)
        cleared = tl.maximum(tl.minimum(last, M) - first, 0)
        end = total + tl.cumsum(cleared, 0)
        tl.store(ends + b, end, mask=inside)
        tl.store(tops + b, first + end - 1, mask=inside)
        tl.store(status + b, bits, mask=inside)
        tl.store(seq_lens + row, new, mask=shorter)
        total += tl.sum(cleared, 0)
    release_all(
        total, ends, tops, slots, B, block_table, stride, free_pages, num_free, ref_counts, P, null_page, status, half,
        WINDOWED,
    )  # fmt: skip


def kv_rollback(
    seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, window, sinks,
    status,
) -> None:  # fmt: skip
    B, (rows, M), P = num_rejected.shape[0], block_table.shape, free_pages.shape[0]
    with workspace(0, 0, {}, block_table.device, ends=B, tops=B) as scratch:
        kv_rollback_kernel[(1,)](
            seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, window, sinks,
            status, scratch["ends"], scratch["tops"], block_table.stride(0), B, rows, M, P, power_of_2(B) // 2,
            WINDOWED=window > 0, **OPTIONS,
        )  # fmt: skip
