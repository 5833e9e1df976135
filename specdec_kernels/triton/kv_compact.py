"""`kv_compact` in Triton: one launch for all caches, a program per request, cache and piece of a token's row."""

import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2
from ._moves import words_at
from ._pages import tokens_of

IN_FLIGHT = 2048
"""Words that a program holds between reading and writing: eight a thread."""


@triton.jit
def _place(position, row, blocks, width, pages, null_page, length, page_stride, token_stride, PAGE: tl.constexpr):
    """(words into a cache, whether they are there) of logical positions. PAGE > 0: pages of so many tokens, found by the
    request's `width` blocks; else the cache's row `row` of `length` tokens."""
    there = position >= 0
    if PAGE > 0:
        block = position // PAGE
        there = there & (block < width)
        page = tl.load(blocks + tl.where(there, block, 0), mask=there, other=-1).to(tl.int64)
        there = there & (page != null_page)
        offset = position % PAGE
    else:
        there = there & (position < length)
        page = row + tl.zeros_like(position)
        offset = position
    return page * page_stride + offset * token_stride, there & (page >= 0) & (page < pages)


@triton.jit(do_not_specialize=["K", "caches", "pieces", "width", "pages", "null_page", "length"])
def kv_compact_kernel(
    table, path, seq_lens, block_table, slots, caches, pieces, K, width, pages, null_page, length,
    table_stride, page_stride, token_stride, head_stride, token_words,
    HEAD: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program moves its PIECE of the words of each accepted token of one request in one cache, which no other program
    touches. Strides count words. A token is one run of words, or (HEAD > 0) heads of HEAD words that lie apart.

    ROWS moves at once: all are read before any is written, since a destination may be the source of another. Chunks follow
    one another in ascending order, and that is exact: node n of move i has n > i + 1, so it lies behind the destinations of all
    earlier moves, and no chunk reads what an earlier one wrote. A chunk does overwrite sources of earlier ones; the barrier
    between its reads and its writes is behind theirs as well."""
    program = tl.program_id(0).to(tl.int64)
    piece, b = program % pieces, program // pieces // caches
    root = tl.load(seq_lens + b).to(tl.int64)
    row = b
    if SLOTS:
        row = tl.load(slots + b).to(tl.int64)
    blocks = block_table + b * table_stride
    base = words_at(table, program // pieces % caches, WORD, WIDE)
    word = piece * PIECE + tl.arange(0, PIECE)
    inside = word < token_words
    if HEAD > 0:
        at = word // HEAD * head_stride + word % HEAD
    else:
        at = word
    for first in range(0, K, ROWS):
        i = first + tl.arange(0, ROWS)
        node = tl.load(path + b * K + i, mask=i < K, other=-1)
        before = tl.load(path + b * K + i - 1, mask=(i > 0) & (i < K), other=0)
        moves = (node > before) & (node > i + 1)
        source, is_there = _place(
            tl.where(moves, root + node, -1), row, blocks, width, pages, null_page, length, page_stride, token_stride, PAGE
        )  # fmt: skip
        destination, has_place = _place(
            tl.where(moves, root + 1 + i, -1), row, blocks, width, pages, null_page, length, page_stride, token_stride, PAGE
        )  # fmt: skip
        moves = is_there & has_place
        if tl.max(moves.to(tl.int32), 0) > 0:
            real = moves[:, None] & inside[None, :]
            values = tl.load(base + (source[:, None] + at[None, :]), mask=real)
            tl.debug_barrier()
            tl.store(base + (destination[:, None] + at[None, :]), values, mask=real)


def kv_compact(caches, path, seq_lens, block_table, slots, null_page) -> None:
    cache, (B, K) = caches[0], path.shape
    table, heads, head, word, wide, strides = tokens_of("kv_compact", caches)
    rows = min(power_of_2(K), 32)
    piece = min(power_of_2(heads * head), IN_FLIGHT // rows)
    pieces = -(-heads * head // piece)
    paged = block_table is not None
    kv_compact_kernel[(B * len(caches) * pieces,)](
        table, path, seq_lens, block_table if paged else path, slots if slots is not None else path,
        len(caches), pieces, K, block_table.shape[1] if paged else 0, cache.shape[0], null_page,
        cache.shape[1], block_table.stride(0) if paged else 0, *strides, heads * head,
        HEAD=head if heads > 1 else 0, ROWS=rows, PIECE=piece, WORD=word, WIDE=wide, PAGE=cache.shape[1] if paged else 0,
        SLOTS=slots is not None, **OPTIONS,
    )  # fmt: skip
