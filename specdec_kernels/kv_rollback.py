"""`kv_rollback`: rejected tokens leave a paged cache, their pages go back to the free list."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import _backends, _checks, _paged_cache
from .kv_scrub import check_scrub, kv_scrub


def kv_rollback(
    seq_lens: Tensor,
    num_rejected: Tensor,
    block_table: Tensor,
    free_pages: Tensor,
    num_free: Tensor,
    page_size: int,
    *,
    ref_counts: Tensor | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
    window: int | None = None,
    sinks: int = 0,
    scrub: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Takes rejected tokens off a paged cache, in place, on the device, across any number of pages:

        seq_lens[b] -= num_rejected[b]

    and the blocks that lie wholly past the new length, ceil(new / page_size) .. ceil(old / page_size) - 1, become `null_page`
    in the table while their pages are released. Blocks reserved past the old length stay. A request with nothing rejected is
    untouched, whatever its table holds; `num_rejected = seq_lens` frees a request.

    A released page is pushed onto the free list; with `ref_counts` its count drops by one, and it is pushed when that makes 0.
    Releases happen one after another on every backend, requests ascending, within a request from its last block to its first:
    the next pops give them back first to last, and a page that several requests of the batch release is pushed at the
    place of the last of them.

    For layers with a sliding window give `window` and `sinks`, the same as everywhere else: their older blocks may have been
    evicted (`kv_evict`; entries of `null_page`). A request that the rollback would leave in need of what is gone, the blocks of
    positions new - window + 1 .. new - 1 or the partly filled one, is not rolled back: its length, table and pages stay and its
    status is EVICTED. Evicted blocks among those to release are passed over. Without a window nothing of this is looked at.

    A hybrid model has a table for each kind of layer, `seq_lens` of its own for each, as a call changes them in place, and a
    call for each. Roll the sliding kind back first, and give the others what it did:
    `num_rejected.masked_fill((status & CacheStatus.EVICTED) != 0, 0)`, which needs no sync.

    Args:
        seq_lens: int32 [B], or [R] with `slots`: tokens of each request in the cache, the rejected ones included; updated. Below
            0 counts as 0.
        num_rejected: int32 [B], clamped to 0..seq_lens of the request.
        block_table: int32 [B, M], M >= 1, or [R, M] with `slots`: the page of each request's m-th block, `null_page` where there
            is none; updated. Rows may be strided.
        free_pages: int32 [P], P >= 1, a stack of the pages that nobody holds, its top at entry num_free - 1; updated.
        num_free: int32 [1], clamped to 0..P; updated.
        page_size: tokens of a page, 1..2^31 - 1.
        ref_counts: int32 [P], entries of block tables that hold each page (a prefix cache's own hold counts as one); updated.
            None: each page has one holder.
        slots: int32/int64 [B], distinct, where the tables are those of all requests that an engine has: request b's length and
            pages are seq_lens[slots[b]] and block_table[slots[b]], of R >= 1 rows; the other arguments and the status stay [B],
            and the batch's order decides. A slot outside 0..R - 1 skips its request, as -1 does a padded row of a CUDA graph:
            none of it is looked at and its status is 0. A slot given twice is the caller's error: results are undefined, but
            nothing outside the tables is written. None: row b.
        null_page: the entry of a block table that stands for no page, read and written: -1, or a page in 0..P - 1 that is given
            up for it, as vLLM does block 0, and is then never pushed, handed out, counted or written.
        window: positions that a token's attention reads, its own included, as transformers and vLLM count: the token at n reads
            n - window + 1 .. n; 1..2^31 - 1. None: all of them.
        sinks: first tokens that every position reads as well and whose blocks `kv_evict` was told to keep, 0..2^31 - 1; 0 without
            a window.
        scrub: caches in which all that is let go of becomes zero, so that its next holder cannot read it: every page that this
            call pushes, and for a request with something rejected whose new length ends within a page, the rest of that page.
            What is left of a page that others hold too (`ref_counts` above 1 afterwards) stays, as they may read it; so does a
            page that was not pushed. A list or tuple as `kv_compact` takes it, page_size tokens a page, at least P pages;
            it costs one more launch for each layout among them. None: caches are not touched.
        out: int32 [B] to write the status into.

    Returns:
        int32 [B], bits of `CacheStatus`. BAD_PAGE: a block to release has no page of the cache, so nothing is released there.
        BAD_REF_COUNT: the page's count is below 1; it stays so and nothing is pushed. FREE_LIST_FULL: P pages are on the list
        already; the page is not pushed. EVICTED: see above. The rest of the call is as if those releases had not been asked for.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device and the work does not depend on P, so a CUDA graph can hold it (with `scrub` on Triton, once
    the same caches have been through a call outside of it).

    Four drafts were verified and one accepted: three tokens of nine leave, and the page that held only the last of them:

    >>> import specdec_kernels as sk
    >>> i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> seq_lens, table, free_pages, num_free = i32(9), i32([5, 2, 7, -1]), i32(3, *[-1] * 7), i32(1)
    >>> sk.kv_rollback(seq_lens, i32(3), table, free_pages, num_free, 4)
    tensor([0], dtype=torch.int32)
    >>> seq_lens.tolist(), table.tolist(), free_pages[:num_free].tolist()
    ([6], [[5, 2, -1, -1]], [3, 7])

    With a window of 4 the first block was evicted at nine tokens; at seven the next token reads 4, 5 and 6, at six it reads 3:

    >>> seq_lens, table = i32(9, 9), i32([-1, 2, 7, -1], [-1, 4, 0, -1])
    >>> sk.kv_rollback(seq_lens, i32(2, 3), table, free_pages, num_free, 4, window=4)
    tensor([ 0, 32], dtype=torch.int32)
    >>> seq_lens.tolist(), table.tolist()
    ([7, 9], [[-1, 2, -1, -1], [-1, 4, 0, -1]])
    """
    op = "kv_rollback"
    B, device = _paged_cache.check(
        op, seq_lens, block_table, free_pages, num_free, ref_counts, page_size, slots, null_page
    )
    _checks.vector(op, "num_rejected", num_rejected, _paged_cache.I32, B, "B", device)
    _paged_cache.check_window(op, window, sinks)
    if scrub is not None:
        check_scrub(op, scrub, free_pages.shape[0], page_size, device)
    out = _paged_cache.status_of(op, out, B, device)
    if B:
        backend = _backends.resolve(op, backend, device)
        before = num_free.clone() if scrub else num_free
        _backends.op(op, backend)(
            seq_lens, num_rejected, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, window or 0,
            sinks, out,
        )  # fmt: skip
        if scrub:
            kv_scrub(
                scrub, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page,
                backend=backend,
            )  # fmt: skip
    return out
