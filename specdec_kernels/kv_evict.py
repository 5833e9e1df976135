"""`kv_evict`: pages that a sliding window has left, or that a budget drops, go back to the free list."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import _backends, _paged_cache
from .kv_scrub import check_scrub, kv_scrub


def kv_evict(
    seq_lens: Tensor,
    keep_last: int,
    block_table: Tensor,
    free_pages: Tensor,
    num_free: Tensor,
    page_size: int,
    *,
    sinks: int = 0,
    ref_counts: Tensor | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
    scrub: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Lets the pages of a paged cache go that hold neither the first `sinks` tokens nor the last `keep_last`, in place, on the
    device: the blocks m of request b with

        ceil(sinks / page_size) <= m    and    (m + 1) * page_size <= seq_lens[b] - keep_last

    become `null_page` in the table while their pages are released as those of `kv_rollback` are: requests ascending, within a
    request from its last such block to its first, a page that others hold losing one count. Lengths stay: positions and slots
    are those of the whole text. It stops at the first entry that is `null_page`, as what lies before it was evicted earlier, so
    a call costs what it evicts and the length does not matter. It does not come back for what an earlier call kept as sinks.

    How many tokens to keep:

    - A window of w (`window` of `kv_rollback`) and steps that verify at most d drafts: w - 1 + d + 1 = w + d. That is the window
      before the step's first token, and the step's d + 1 tokens, so that it may be called anywhere in a step, and the step taken
      back whole, without the rollback reaching what is gone. With less `kv_rollback(..., window=w)` says EVICTED where it does.
    - A budget of k tokens for a drafter's cache, of which a step takes at most d back: k, and `window=k - d` for `kv_rollback`.

    Args:
        seq_lens: int32 [B], or [R] with `slots`: tokens of each request in the cache, evicted ones included. Below 0 counts as 0.
        keep_last: last tokens that stay, 1..2^31 - 1.
        block_table: int32 [B, M], M >= 1, or [R, M] with `slots`: the page of each request's m-th block, `null_page` where there
            is none; updated. Rows may be strided.
        free_pages: int32 [P], P >= 1, a stack of the pages that nobody holds, its top at entry num_free - 1; updated.
        num_free: int32 [1], clamped to 0..P; updated.
        page_size: tokens of a page, 1..2^31 - 1.
        sinks: first tokens that stay, 0..2^31 - 1; the same at every call.
        ref_counts: int32 [P], entries of block tables that hold each page (a prefix cache's own hold counts as one); updated.
            None: each page has one holder.
        slots: int32/int64 [B], distinct, where the tables are those of all requests that an engine has: request b's length and
            pages are seq_lens[slots[b]] and block_table[slots[b]], of R >= 1 rows; the other arguments and the status stay [B],
            and the batch's order decides. A slot outside 0..R - 1 skips its request, as -1 does a padded row of a CUDA graph:
            none of it is looked at and its status is 0. A slot given twice is the caller's error: results are undefined, but
            nothing outside the tables is written. None: row b.
        null_page: the entry of a block table that stands for no page, read and written: -1, or a page in 0..P - 1 that is given
            up for it, as vLLM does block 0, and is then never pushed, handed out, counted or written.
        scrub: caches in which the pages that this call pushes become zero, as in `kv_rollback`; None: caches are not touched.
        out: int32 [B] to write the status into.

    Returns:
        int32 [B], bits of `CacheStatus`, as from `kv_rollback`: BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device and the work does not depend on P, so a CUDA graph can hold it (with `scrub`
    on Triton, once the same caches have been through a call outside of it).

    Seventeen tokens in pages of four, of which the first three and the last six stay:

    >>> import specdec_kernels as sk
    >>> i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> table, free_pages, num_free = i32([5, 2, 7, 0, 4, -1]), i32(3, *[-1] * 7), i32(1)
    >>> sk.kv_evict(i32(17), 6, table, free_pages, num_free, 4, sinks=3)
    tensor([0], dtype=torch.int32)
    >>> table.tolist(), free_pages[:num_free].tolist()
    ([[5, -1, 7, 0, 4, -1]], [3, 2])
    """
    op = "kv_evict"
    B, device = _paged_cache.check(
        op, seq_lens, block_table, free_pages, num_free, ref_counts, page_size, slots, null_page
    )
    _paged_cache.whole_number(op, "keep_last", keep_last, 2**31)
    _paged_cache.whole_number(op, "sinks", sinks, 2**31, start=0)
    if scrub is not None:
        check_scrub(op, scrub, free_pages.shape[0], page_size, device)
    out = _paged_cache.status_of(op, out, B, device)
    if B:
        backend = _backends.resolve(op, backend, device)
        before = num_free.clone() if scrub else num_free
        _backends.op(op, backend)(
            seq_lens, keep_last, block_table, free_pages, num_free, ref_counts, slots, page_size, null_page, sinks, out
        )
        if scrub:
            kv_scrub(scrub, free_pages, before, num_free, null_page=null_page, backend=backend)
    return out
