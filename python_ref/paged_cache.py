"""What `kv_rollback` and `kv_append_slots` share: status bits, blocks of a length."""

BAD_PAGE = 1
BAD_REF_COUNT = 2
FREE_LIST_FULL = 4
OUT_OF_PAGES = 8
TABLE_FULL = 16


def blocks(tokens: int, page_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-tokens // page_size)
