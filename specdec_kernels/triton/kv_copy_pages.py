"""`kv_copy_pages` in Triton: one launch for all caches of a layout."""

import triton
import triton.language as tl

from ._launch import OPTIONS
from ._moves import words_at
from ._paged_cache import LANES
from ._pages import first_of, offsets, pages_of, turn_after


@triton.jit(do_not_specialize=["N", "shares", "pieces", "pages"])
def kv_copy_pages_kernel(
    table, src, dst, N, shares, pieces, pages, words, page_stride, row_stride, run_stride,
    RUN: tl.constexpr, INNER: tl.constexpr, ROW: tl.constexpr, DENSE: tl.constexpr,
    PIECE: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program copies its share of the pieces of one cache, PIECE words each, which no other program touches. It looks at LANES
    entries at once and goes from one that is to be copied to the next. No page is both read and written, so nothing is ordered.
    Strides count words."""
    program = tl.program_id(0)
    turn, base = program % shares, words_at(table, program // shares, WORD, WIDE)
    lane = tl.arange(0, LANES)
    for start in range(0, N, LANES):
        n = start + lane
        source = tl.load(src + n, mask=n < N, other=-1)
        destination = tl.load(dst + n, mask=n < N, other=-1)
        real = (source >= 0) & (source < pages) & (destination >= 0) & (destination < pages)
        i = first_of(real, lane)
        while i < LANES:
            if turn < pieces:
                from_page = base + tl.load(src + start + i).to(tl.int64) * page_stride
                to_page = base + tl.load(dst + start + i).to(tl.int64) * page_stride
                for piece in range(turn.to(tl.int64), pieces, shares):
                    word = piece * PIECE + tl.arange(0, PIECE)
                    at = offsets(word, row_stride, run_stride, RUN, INNER, ROW, DENSE)
                    values = tl.load(from_page + at, mask=word < words)
                    tl.store(to_page + at, values, mask=word < words)
            turn = turn_after(turn, pieces, shares)
            i = first_of(real & (lane > i), lane)


def kv_copy_pages(caches, src, dst) -> None:
    p = pages_of("kv_copy_pages", caches)
    options = {name: value for name, value in p.options.items() if name != "TOKENS_OUTSIDE"}
    kv_copy_pages_kernel[(p.shares * len(caches),)](
        p.table, src, dst, src.shape[0], p.shares, p.pieces, caches[0].shape[0], p.words, p.page_stride,
        p.row_stride, p.run_stride, **options, **OPTIONS,
    )  # fmt: skip
