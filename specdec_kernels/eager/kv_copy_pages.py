"""`kv_copy_pages` in plain torch."""

from .. import _backends
from ._moves import bits, only


def kv_copy_pages(caches, src, dst) -> None:
    pages, source, destination = caches[0].shape[0], src.long(), dst.long()
    moves = (source >= 0) & (source < pages) & (destination >= 0) & (destination < pages)
    source, destination = only(moves, source, destination)
    for cache in map(bits, caches):
        cache[destination] = cache[source]


_backends.register_eager("kv_copy_pages", kv_copy_pages)
