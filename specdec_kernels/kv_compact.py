"""`kv_compact`: the accepted path of a verified tree, moved in the cache to follow its root."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _backends, _checks, _paged_cache


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    page_size: int | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
    backend: str = "auto",
) -> None:
    """Moves the accepted nodes of each request's tree, in every layer's cache and in place, so that the accepted text lies
    contiguously. With L = seq_lens[b], the forward left the tree's root (node 0) at logical position L and node n at L + n:

        cache[L + 1 + i] = cache[L + path[b, i]]     for every i, as if all were read before any is written

    The new length is L + 1 + num_accepted[b]. What is behind it is the next step's to overwrite.

    A logical position p of request b is at offset p % page_size of page block_table[b, p // page_size]. Without `block_table`
    it is at offset p of row b, or slots[b].

    Args:
        caches: K and V of every layer in any order, a list or tuple of views [pages, page_size, H, D], or [pages, page_size, D]
            (MLA's latents, scales per token), last dimension contiguous, elements of 1, 2 or 4 bytes, which are moved as bits.
            HND is `cache.transpose(1, 2)`, fused K and V are `cache[:, 0]` and `cache[:, 1]` or `cache[0]` and `cache[1]`.
            Contiguous caches are [B, T, H, D], or [B, H, T, D] transposed alike. One launch moves all caches of one element
            size, shape and strides; there is one for each of those that differ.
        path: int32 [B, K], as `verify_tree` returns it: node numbers in ascending order, -1 behind them.
        seq_lens: int32/int64 [B]: tokens that the cache held before the step.
        block_table: int32/int64 [B, W], rows contiguous, or None for contiguous caches.
        page_size: None takes the caches' second dimension; where it is given, a cache in another layout is an error.
        slots: int32/int64 [B], row of each request in contiguous caches; None: row b.
        null_page: the entry of the block table that stands for no page, as in `kv_append_slots`: -1, or with a block table one of
            the caches' pages, which is then neither read nor written.

    Only what moves is read or written. A node already in its place, an entry of `path` that is not above the one before it and
    above i, and a position without a place (behind the block table or the row; a block or slot of -1, or past the end;
    `null_page`) are skipped. Requests must not share what is written: a shared page is copied first.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device, but for the first Triton call with a set of caches, which copies their addresses there: a CUDA
    graph can hold a call once the same caches have been through one outside of it.

    Nodes 2 and 3 of a tree of three were accepted behind a root at position 4:

    >>> cache = torch.arange(8.0).view(1, 8, 1, 1)
    >>> kv_compact([cache], torch.tensor([[2, 3, -1]], dtype=torch.int32), torch.tensor([4]))
    >>> cache.flatten()
    tensor([0., 1., 2., 3., 4., 6., 7., 7.])
    """
    op = "kv_compact"
    if not isinstance(path, Tensor) or path.dim() != 2 or path.dtype != torch.int32:
        _checks.fail(op, "path", "int32 [B, K]", path)
    (B, K), device = path.shape, path.device
    _checks.vector(op, "seq_lens", seq_lens, _checks.INDEX_DTYPES, B, "B", device)
    if page_size is not None and block_table is None:
        _checks.fail(op, "page_size", "None without a block_table", page_size)
    if null_page != -1 and block_table is None:
        _checks.fail(op, "null_page", "-1 without a block_table", null_page)
    if block_table is not None:
        fits = isinstance(block_table, Tensor) and block_table.dim() == 2 and block_table.shape[0] == B
        if not fits or block_table.dtype not in _checks.INDEX_DTYPES or block_table.device != device:
            _checks.fail(op, "block_table", f"int32 or int64 [B={B}, W] on {device}", block_table)
        if not _checks.dense(block_table, 1):
            _checks.fail(op, "block_table", "contiguous in its last dimension", f"strides {list(block_table.stride())}")
        if slots is not None:
            _checks.fail(op, "slots", "None with a block_table", slots)
    if slots is not None:
        _checks.vector(op, "slots", slots, _checks.INDEX_DTYPES, B, "B", device)
    _checks.tensors(op, "caches", caches, device)
    groups = _checks.alike(caches)
    for i in (members[0] for members in groups):
        _checks.cache(op, f"caches[{i}]", caches[i], " (contiguous: B rows of T tokens)")
        if block_table is not None:
            _paged_cache.check_null_page(op, null_page, caches[i].shape[0], "pages")
        page = caches[0].shape[1] if page_size is None else page_size
        if block_table is not None and caches[i].shape[1] != page:
            _checks.fail(op, f"caches[{i}]", f"of page_size={page} tokens a page in dimension 1", caches[i])
        if block_table is None and slots is None and caches[i].shape[0] < B:
            _checks.fail(op, f"caches[{i}]", f"of at least B={B} rows, or given with slots or a block_table", caches[i])
    if not B or not K or (block_table is not None and not block_table.shape[1]):
        return
    run, path = _backends.op(op, _backends.resolve(op, backend, device)), path.contiguous()
    for members in groups:
        if caches[members[0]].numel():
            run([caches[i] for i in members], path, seq_lens, block_table, slots, null_page)
