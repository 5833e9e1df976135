"""`kv_append_slots`: where the next tokens of each request go in a paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _paged_cache


class AppendOutput(NamedTuple):
    """Where each request's new tokens go.

    `slots` int64 [B, max_new]: of its j-th new token, page * page_size + offset; -1 where there is none ·
    `copy_src`, `copy_dst` int32 [B]: the page to copy before anything is written, and to which one; -1 where none ·
    `status` int32 [B]: bits of `CacheStatus`; a request with any got nothing."""

    slots: Tensor
    copy_src: Tensor
    copy_dst: Tensor
    status: Tensor


def kv_append_slots(
    seq_lens: Tensor,
    num_new: Tensor,
    block_table: Tensor,
    free_pages: Tensor,
    num_free: Tensor,
    page_size: int,
    *,
    ref_counts: Tensor | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
    max_new: int,
    out: AppendOutput | None = None,
    backend: str = "auto",
) -> AppendOutput:
    """Makes room for each request's next tokens in a paged cache, in place, on the device:

        slots[b, j] = page * page_size + offset    of token seq_lens[b] + j,    then    seq_lens[b] += num_new[b]

    A block that has no page yet gets one from the top of the free list, blocks ascending; one that was reserved is used. A
    page that others hold too (`ref_counts` above 1 when the request's turn comes) is not written: the block gets a page of its
    own and the other's count drops by one. Where that is the request's partly filled last block, `copy_src` and `copy_dst` say
    which page `kv_copy_pages` has to copy before the tokens are written. The count of a page from the free list becomes 1.

    Requests are served one after another, ascending. Each gets all that it asks for or nothing: one that does not fit keeps its
    length, table and counts, and takes no page from a later one that does fit.

    Args:
        seq_lens: int32 [B], or [R] with `slots`: tokens of each request in the cache; updated. Below 0 counts as 0.
        num_new: int32 [B], clamped to 0..max_new. A request with 0 is untouched, whatever its table holds.
        block_table: int32 [B, M], M >= 1, or [R, M] with `slots`: the page of each request's m-th block, `null_page` where there
            is none; updated. Rows may be strided.
        free_pages: int32 [P], P >= 1, a stack of the pages that nobody holds, its top at entry num_free - 1.
        num_free: int32 [1], clamped to 0..P; updated.
        page_size: tokens of a page, 1..2^31 - 1.
        ref_counts: int32 [P], entries of block tables that hold each page (a prefix cache's own hold counts as one); updated.
            None: each page has one holder.
        slots: int32/int64 [B], distinct, where the tables are those of all requests that an engine has: request b's length and
            pages are seq_lens[slots[b]] and block_table[slots[b]], of R >= 1 rows; the other arguments and all outputs stay
            [B], and the batch's order decides. A slot outside 0..R - 1 skips its request, as -1 does a padded row of a CUDA
            graph: none of it is looked at and it gets nothing, with status 0. A slot given twice is the caller's error: results
            are undefined, but nothing outside the tables is written. None: row b.
        null_page: the entry of a block table that stands for no page, read and written: -1, or a page in 0..P - 1 that is given
            up for it, as vLLM does block 0, and is then never pushed, handed out, counted or written.
        max_new: columns of the output's `slots`, 1..2^20 - 1.
        out: an AppendOutput of the same shapes to write into; every element is written.

    Returns:
        AppendOutput. Its status: TABLE_FULL and OUT_OF_PAGES say what was missing; BAD_PAGE: the partly filled block, or an
        entry of the free list, is no page of the cache, or is `null_page`.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device and the work does not depend on P, so a CUDA graph can hold it.

    Three tokens for a request of six, in pages of four:

    >>> import specdec_kernels as sk
    >>> i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> seq_lens, table, free_pages, num_free = i32(6), i32([5, 2, -1, -1]), i32(3, 7, *[-1] * 6), i32(2)
    >>> sk.kv_append_slots(seq_lens, i32(3), table, free_pages, num_free, 4, max_new=4).slots
    tensor([[10, 11, 28, -1]])
    >>> seq_lens.tolist(), table.tolist(), free_pages[:num_free].tolist()
    ([9], [[5, 2, 7, -1]], [3])
    """
    op = "kv_append_slots"
    B, device = _paged_cache.check(
        op, seq_lens, block_table, free_pages, num_free, ref_counts, page_size, slots, null_page
    )
    _checks.vector(op, "num_new", num_new, _paged_cache.I32, B, "B", device)
    _paged_cache.whole_number(op, "max_new", max_new, 2**20)
    out = _outputs(op, out, B, max_new, device)
    if B:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(seq_lens, num_new, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, *out)
    return out


def _outputs(op: str, out, B: int, max_new: int, device: torch.device) -> AppendOutput:
    shapes = AppendOutput((B, max_new), (B,), (B,), (B,))
    dtypes = AppendOutput(torch.int64, torch.int32, torch.int32, torch.int32)
    if out is None:
        return AppendOutput(*(torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)))
    if not isinstance(out, AppendOutput):
        _checks.fail(op, "out", "an AppendOutput", out)
    for name in AppendOutput._fields:
        _checks.output(op, f"out.{name}", getattr(out, name), getattr(dtypes, name), getattr(shapes, name), device)
    return out
