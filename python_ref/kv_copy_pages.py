"""Whole pages of a paged cache, copied to others."""

from torch import Tensor


def kv_copy_pages(caches: list[Tensor], src: Tensor, dst: Tensor) -> list[Tensor]:
    """Arguments as `specdec_kernels.kv_copy_pages`, which works in place; here the caches are left alone and copies returned."""
    copies = [cache.clone() for cache in caches]
    for before, after in zip(caches, copies, strict=True):
        for source, destination in zip(src.tolist(), dst.tolist(), strict=True):
            if 0 <= source < len(before) and 0 <= destination < len(before):
                after[destination] = before[source]
    return copies
