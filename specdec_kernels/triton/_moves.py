"""Device functions of the ops that move bits."""

import triton
import triton.language as tl


@triton.jit
def words_at(table, i, WORD: tl.constexpr, WIDE: tl.constexpr):
    """Pointer to words of WORD bytes at the i-th address of a table. WIDE: 16 bytes may be moved at once."""
    address = tl.load(table + i)
    if WORD == 8:
        base = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        base = address.to(tl.pointer_type(tl.int16))
    else:
        base = address.to(tl.pointer_type(tl.int8))
    if WIDE:
        base = tl.multiple_of(base, 16)
    return base
