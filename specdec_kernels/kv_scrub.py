"""`kv_scrub`: what an op over a paged cache let go of becomes zero. Called by `kv_rollback(scrub=)` and
`kv_evict(scrub=)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _backends, _checks


def check_scrub(op: str, caches, pages: int, page_size: int, device: torch.device) -> None:
    """Of the `scrub` of a public function, whose free list is over `pages` pages."""
    _checks.tensors(op, "scrub", caches, device)
    for i in (members[0] for members in _checks.alike(caches)):
        _checks.cache(op, f"scrub[{i}]", caches[i])
        if caches[i].shape[1] != page_size:
            _checks.fail(op, f"scrub[{i}]", f"of page_size={page_size} tokens a page in dimension 1", caches[i])
        if caches[i].shape[0] < pages:
            _checks.fail(op, f"scrub[{i}]", f"of at least P={pages} pages", caches[i])


def kv_scrub(
    caches: Sequence[Tensor],
    free_pages: Tensor,
    before: Tensor,
    num_free: Tensor,
    seq_lens: Tensor | None = None,
    num_rejected: Tensor | None = None,
    block_table: Tensor | None = None,
    ref_counts: Tensor | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
    *,
    backend: str,
) -> None:
    """Zeroes in every cache the pages free_pages[before : num_free], which an op has just pushed there (`before` int32 [1] is
    the list's count from before it). Given `seq_lens`, `num_rejected` and `block_table` as `kv_rollback` left them, and its
    `ref_counts` and `slots` if it had any, also what lies from the new end to the page's end, of requests with rejected tokens
    and pages that nobody else holds. Page `null_page` is nobody's.

    Arguments have been checked, by `check_scrub` and by the op itself. `backend` is a resolved one. Whatever the list and the
    table hold, nothing is written but pages of the caches below len(free_pages). One launch for each layout among the caches;
    nothing waits for the device, but for the first Triton call with a set of caches."""
    run = _backends.op("kv_scrub", backend)
    for members in _checks.alike(caches):
        if caches[members[0]].numel():
            group = [caches[i] for i in members]
            run(group, free_pages, before, num_free, seq_lens, num_rejected, block_table, ref_counts, slots, null_page)
