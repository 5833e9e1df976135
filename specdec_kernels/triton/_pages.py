"""Whole pages of caches of one layout: their words, and the programs that share them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ._launch import power_of_2, processors
from ._paged_cache import LANES
from ._pointers import pointers, word_of

MOST = 2048
"""Words of a piece: eight a thread."""
PROGRAMS = 4
"""For each multiprocessor, as many as it holds at once with 64 registers a thread. What there is to do is known on the device
alone: programs share it out there, and with nothing to do they cost a look each."""


class Tokens(NamedTuple):
    """A token is `heads` runs of `head` words of `word` bytes: one run where its heads follow one another."""

    table: Tensor
    heads: int
    head: int
    word: int
    wide: bool
    strides: tuple[int, int, int]
    """words from one page, one token and one head to the next"""


def tokens_of(op: str, caches: list[Tensor]) -> Tokens:
    cache = caches[0]
    size, head = cache.element_size(), cache.shape[-1]
    heads, head_stride = (cache.shape[2], cache.stride(2)) if cache.dim() == 4 else (1, head)
    if heads == 1 or head_stride == head:
        heads, head, head_stride = 1, heads * head, heads * head
    strides = [stride * size for stride in (cache.stride(0), cache.stride(1), head_stride)]
    found = pointers(op, caches)
    word, wide = word_of(found.bits | strides[0] | strides[1] | strides[2] | head * size)
    page_stride, token_stride, head_stride = (stride // word for stride in strides)
    return Tokens(found.table, heads, head * size // word, word, wide, (page_stride, token_stride, head_stride))


class Pages(NamedTuple):
    """A page is runs of RUN words, INNER of them a row of ROW words: heads of a token, or where heads lie further apart (HND)
    tokens of a head."""

    table: Tensor
    shares: int
    """programs a cache"""
    pieces: int
    """of a page, each of `options["PIECE"]` words"""
    words: int
    page_stride: int
    row_stride: int
    """words from one row to the next"""
    run_stride: int
    """words from one run of a row to the next"""
    options: dict


def pages_of(op: str, caches: list[Tensor]) -> Pages:
    table, heads, run, word, wide, (page_stride, token_stride, head_stride) = tokens_of(op, caches)
    tokens = caches[0].shape[1]
    tokens_outside = heads == 1 or token_stride >= head_stride
    inner, run_stride, row_stride = heads, head_stride, token_stride
    if not tokens_outside:
        inner, run_stride, row_stride = tokens, token_stride, head_stride
    words = tokens * heads * run
    piece = min(power_of_2(words), MOST)
    options = {
        "RUN": run,
        "INNER": inner,
        "ROW": inner * run,
        "DENSE": run_stride == run and row_stride == inner * run,
        "TOKENS_OUTSIDE": tokens_outside,
        "PIECE": piece,
        "WORD": word,
        "WIDE": wide,
    }
    shares = -(-PROGRAMS * processors(caches[0].device) // len(caches))
    return Pages(table, shares, -(-words // piece), words, page_stride, row_stride, run_stride, options)


@triton.jit
def offsets(
    word, row_stride, run_stride, RUN: tl.constexpr, INNER: tl.constexpr, ROW: tl.constexpr, DENSE: tl.constexpr
):
    """Words into a page, of the words of a page counted in the order of memory."""
    if DENSE:
        at = word
    else:
        at = word // ROW * row_stride + word // RUN % INNER * run_stride + word % RUN
    return at


@triton.jit
def first_of(found, lane):
    """The lowest lane where something was found, or LANES."""
    return tl.min(tl.where(found, lane, LANES), 0)


@triton.jit
def turn_after(turn, pieces, shares):
    """A program takes every `shares`-th piece of all pages one after another, so that each has as much to do whichever pages
    those are. Its first piece at one page being `turn`, this is its first at the next."""
    passed = tl.maximum(pieces - turn + shares - 1, 0) // shares
    return turn + passed * shares - pieces
