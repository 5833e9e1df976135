"""`kv_scrub` in Triton: one launch for all caches of a layout."""

import triton
import triton.language as tl

from ._launch import OPTIONS
from ._moves import words_at
from ._paged_cache import LANES, is_page, row_of
from ._pages import first_of, offsets, pages_of, turn_after


@triton.jit(do_not_specialize=["null_page", "B", "rows", "M", "P", "shares", "pieces", "page_size"])
def kv_scrub_kernel(
    table, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page,
    table_stride, B, rows, M, P, shares, pieces, page_size, words, page_stride, row_stride, run_stride,
    RUN: tl.constexpr, INNER: tl.constexpr, ROW: tl.constexpr, DENSE: tl.constexpr, TOKENS_OUTSIDE: tl.constexpr,
    PIECE: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program zeroes its share of the pieces of one cache, PIECE words each: of the pages that were pushed, then of those
    that requests hold a part of, found LANES requests at once. Only pages below P are written, which every cache has. Strides
    count words."""
    program = tl.program_id(0)
    share, base = program % shares, words_at(table, program // shares, WORD, WIDE)
    zeros = tl.zeros([PIECE], tl.int8)
    first = tl.minimum(tl.maximum(tl.load(before), 0), P)
    pushed = tl.minimum(tl.maximum(tl.load(num_free), 0), P) - first
    for item in range(share.to(tl.int64), pushed.to(tl.int64) * pieces, shares):
        page = tl.load(free_pages + first + item // pieces)
        if is_page(page, P, null_page):
            word = item % pieces * PIECE + tl.arange(0, PIECE)
            at = page.to(tl.int64) * page_stride + offsets(word, row_stride, run_stride, RUN, INNER, ROW, DENSE)
            tl.store(base + at, zeros, mask=word < words)

    if block_table is not None:
        lane = tl.arange(0, LANES)
        turn = share
        for start in range(0, B, LANES):
            b = start + lane
            row, there = row_of(slots, b, b < B, rows)
            new = tl.load(seq_lens + row, mask=there, other=0)
            rejected = tl.load(num_rejected + b, mask=b < B, other=0)
            block = new // page_size
            cut = (rejected > 0) & (new > 0) & (new % page_size != 0) & (block < M)
            page = tl.load(block_table + row.to(tl.int64) * table_stride + block, mask=cut, other=-1)
            cut = cut & is_page(page, P, null_page)
            if ref_counts is not None:
                cut = cut & (tl.load(ref_counts + page, mask=cut, other=2) <= 1)
            i = first_of(cut, lane)
            while i < LANES:
                if turn < pieces:
                    found = start + i
                    if slots is not None:
                        found = tl.load(slots + found).to(tl.int32)
                    length = tl.load(seq_lens + found)
                    entry = found.to(tl.int64) * table_stride + length // page_size
                    at_page = base + tl.load(block_table + entry).to(tl.int64) * page_stride
                    for piece in range(turn.to(tl.int64), pieces, shares):
                        word = piece * PIECE + tl.arange(0, PIECE)
                        if TOKENS_OUTSIDE:
                            token = word // ROW
                        else:
                            token = word // RUN % INNER
                        past = (word < words) & (token >= length % page_size)
                        tl.store(
                            at_page + offsets(word, row_stride, run_stride, RUN, INNER, ROW, DENSE), zeros, mask=past
                        )
                turn = turn_after(turn, pieces, shares)
                i = first_of(cut & (lane > i), lane)


def kv_scrub(
    caches, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page
) -> None:
    p = pages_of("kv_scrub", caches)
    B, (rows, M) = (0, (0, 0)) if block_table is None else (num_rejected.shape[0], block_table.shape)
    kv_scrub_kernel[(p.shares * len(caches),)](
        p.table, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page,
        0 if block_table is None else block_table.stride(0), B, rows, M, free_pages.shape[0], p.shares, p.pieces,
        caches[0].shape[1], p.words, p.page_stride, p.row_stride, p.run_stride, **p.options, **OPTIONS,
    )  # fmt: skip
