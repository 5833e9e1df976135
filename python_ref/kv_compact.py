"""The accepted path of a tree, moved to lie behind its root in the cache."""

from torch import Tensor

from .paged_cache import is_page


def kv_compact(
    caches: list[Tensor],
    path: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    null_page: int = -1,
) -> list[Tensor]:
    """Arguments as `specdec_kernels.kv_compact`, which works in place; here the caches are left alone and copies returned."""
    return [_compact(cache, path.tolist(), seq_lens.tolist(), block_table, slots, null_page) for cache in caches]


def moves(path: list[int]) -> list[tuple[int, int]]:
    """(node, i) of every node that moves, to i + 1 behind the root: the nodes ascend, and one at i + 1 is there already."""
    before = [0, *path]
    return [(node, i) for i, node in enumerate(path) if node > before[i] and node > i + 1]


def _compact(
    cache: Tensor, paths: list, seq_lens: list, block_table: Tensor | None, slots: Tensor | None, null_page: int
) -> Tensor:
    before, after = cache.clone(), cache.clone()
    for b, (path, root) in enumerate(zip(paths, seq_lens, strict=True)):
        for node, i in moves(path):
            source = _place(cache, b, root + node, block_table, slots, null_page)
            destination = _place(cache, b, root + 1 + i, block_table, slots, null_page)
            if source is not None and destination is not None:
                after[destination] = before[source]
    return after


def _place(
    cache: Tensor, b: int, position: int, block_table: Tensor | None, slots: Tensor | None, null_page: int
) -> tuple[int, int] | None:
    """(page, offset) of a logical position of request b, or None if it has no place."""
    pages, page_size = cache.shape[:2]
    if block_table is None:
        page, offset = (b if slots is None else int(slots[b])), position
    else:
        block, offset = divmod(position, page_size)
        page = int(block_table[b, block]) if 0 <= block < block_table.shape[1] else -1
    return (page, offset) if is_page(page, pages, null_page) and 0 <= offset < page_size else None
