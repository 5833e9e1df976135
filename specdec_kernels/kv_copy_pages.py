"""`kv_copy_pages`: whole pages of paged caches, copied to others: what copy on write asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import _backends, _checks


def kv_copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor, *, backend: str = "auto") -> None:
    """Copies pages in every layer's cache, in place:

        cache[dst[n]] = cache[src[n]]    for every n whose src[n] and dst[n] are both in [0, pages)

    With `src` and `dst` the `copy_src` and `copy_dst` of `kv_append_slots`, called before anything is written to its slots,
    requests that shared a partly filled page have one each.

    Args:
        caches: K and V of every layer in any order, a list or tuple of views [pages, page_size, H, D], or [pages, page_size, D]
            (MLA's latents, scales per token), last dimension contiguous, elements of 1, 2 or 4 bytes, which are moved as bits.
            HND is `cache.transpose(1, 2)`, fused K and V are `cache[:, 0]` and `cache[:, 1]` or `cache[0]` and `cache[1]`.
            Page sizes and numbers of pages may differ. One launch serves all caches of one element size, shape and strides.
        src, dst: int32/int64 [N]. An entry of -1, or otherwise no page of a cache, is skipped there.

    No page may be both a source and a destination, and the destinations must be distinct, which the entries of one
    `kv_append_slots` are; a page may be the source of several. Otherwise the contents of those pages are undefined.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or layout; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device, but for the first Triton call with a set of caches, which copies their addresses there: a CUDA
    graph can hold a call once the same caches have been through one outside of it.

    >>> cache = torch.arange(6.0).view(3, 2, 1, 1)
    >>> kv_copy_pages([cache], torch.tensor([0, -1]), torch.tensor([2, -1]))
    >>> cache.view(3, 2)
    tensor([[0., 1.],
            [2., 3.],
            [0., 1.]])
    """
    op = "kv_copy_pages"
    if not isinstance(src, Tensor) or src.dim() != 1 or src.dtype not in _checks.INDEX_DTYPES:
        _checks.fail(op, "src", "int32 or int64 [N]", src)
    N, device = src.shape[0], src.device
    _checks.vector(op, "src", src, _checks.INDEX_DTYPES, N, "N", device)
    _checks.vector(op, "dst", dst, _checks.INDEX_DTYPES, N, "N", device)
    _checks.tensors(op, "caches", caches, device)
    groups = _checks.alike(caches)
    for i in (members[0] for members in groups):
        _checks.cache(op, f"caches[{i}]", caches[i])
    if not N:
        return
    run = _backends.op(op, _backends.resolve(op, backend, device))
    for members in groups:
        if caches[members[0]].numel():
            run([caches[i] for i in members], src, dst)
