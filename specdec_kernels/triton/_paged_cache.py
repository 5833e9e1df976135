"""What the Triton ops over a paged cache share."""

import triton
import triton.language as tl

from ._launch import WARPS

BAD_PAGE = tl.constexpr(1)
BAD_REF_COUNT = tl.constexpr(2)
FREE_LIST_FULL = tl.constexpr(4)
OUT_OF_PAGES = tl.constexpr(8)
TABLE_FULL = tl.constexpr(16)
LANES = tl.constexpr(32 * WARPS)
"""Elements looked at together, one a thread: what a thread stores no other thread of the block has still to read."""


@triton.jit
def blocks(tokens, page_size):
    """Blocks that so many tokens fill or begin."""
    return tokens // page_size + (tokens % page_size != 0).to(tl.int32)
