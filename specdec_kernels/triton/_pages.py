"""Whole pages of caches of one layout: their words, and the programs that share them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ._launch import WARPS, power_of_2, processors
from ._pointers import pointers, word_of

LANES = tl.constexpr(32 * WARPS)
"""Entries that a program looks at together, one a thread."""
MOST = 2048
"""Words of a piece: eight a thread."""
PROGRAMS = 4
"""For each multiprocessor, as many as it holds at once with 64 registers a thread. What there is to do is known on the device
alone: programs share it out there, and with nothing to do they cost a look each."""


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
    far: int
    """words from one row to the next"""
    near: int
    """words from one run of a row to the next"""
    options: dict


def pages_of(op: str, caches: list[Tensor]) -> Pages:
    cache = caches[0]
    size, tokens, head = cache.element_size(), cache.shape[1], cache.shape[-1]
    heads, head_stride = (cache.shape[2], cache.stride(2)) if cache.dim() == 4 else (1, head)
    strides = [stride * size for stride in (cache.stride(0), cache.stride(1), head_stride)]
    found = pointers(op, caches)
    word, wide = word_of(found.bits | strides[0] | strides[1] | strides[2] | head * size)
    page_stride, token_stride, head_stride = (stride // word for stride in strides)
    run = head * size // word
    if heads == 1 or head_stride == run:
        heads, run, head_stride = 1, heads * run, heads * run
    tokens_outside = heads == 1 or token_stride >= head_stride
    inner, near, far = heads, head_stride, token_stride
    if not tokens_outside:
        inner, near, far = tokens, token_stride, head_stride
    words = tokens * heads * run
    piece = min(power_of_2(words), MOST)
    options = {
        "RUN": run,
        "INNER": inner,
        "ROW": inner * run,
        "DENSE": near == run and far == inner * run,
        "TOKENS_OUTSIDE": tokens_outside,
        "PIECE": piece,
        "WORD": word,
        "WIDE": wide,
    }
    shares = -(-PROGRAMS * processors(cache.device) // len(caches))
    return Pages(found.table, shares, -(-words // piece), words, page_stride, far, near, options)


@triton.jit
def offsets(word, far, near, RUN: tl.constexpr, INNER: tl.constexpr, ROW: tl.constexpr, DENSE: tl.constexpr):
    """Words into a page, of the words of a page counted in the order of memory."""
    if DENSE:
        at = word
    else:
        at = word // ROW * far + word // RUN % INNER * near + word % RUN
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
