"""Makes the caches that decoders and drafters keep."""

from __future__ import annotations

from .cache import RowCache
from .paged_cache import PagedCache
from .ragged_cache import RaggedCache


def new_cache(
    config, batch_size: int, kind: str = "ragged", *, page_size: int = 16, gather: bool = True, **options
) -> RowCache:
    """An empty cache of `kind`, one of `CACHES`, for the layers of a transformers config; it grows as needed.

    page_size, gather: of a paged one. options: `capacity` in tokens a row, `device`, `budget` and `sinks` of `RowCache`.
    """
    if kind == "paged":
        return PagedCache(config, batch_size, page_size=page_size, gather=gather, **options)
    return RaggedCache(config, batch_size, **options)
