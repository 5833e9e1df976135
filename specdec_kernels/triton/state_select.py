"""`state_select` in Triton: one launch for all layers, a program per request, layer and piece of a state."""

import triton
import triton.language as tl

from ._launch import OPTIONS, power_of_2
from ._moves import words_at
from ._pointers import pointers, word_of

PIECE = 2048
"""Words that a program moves: eight a thread."""


@triton.jit(do_not_specialize=["layers", "pieces", "snapshots", "rows"])
def state_select_kernel(
    states, out, num_accepted, indices, layers, pieces, snapshots, rows, row_stride, snapshot_stride, out_stride, words,
    BLOCK: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr, IN_PLACE: tl.constexpr, INDICES: tl.constexpr,
):  # fmt: skip
    """A program moves BLOCK words of the chosen snapshot of one request in one layer. Strides count words."""
    program = tl.program_id(0).to(tl.int64)
    piece, layer, b = program % pieces, program // pieces % layers, program // pieces // layers
    j = tl.minimum(tl.maximum(tl.load(num_accepted + b), 0), snapshots - 1).to(tl.int64)
    row = b
    if INDICES:
        row = tl.load(indices + b).to(tl.int64)
    moves = (row >= 0) & (row < rows)
    if IN_PLACE:
        moves = moves & (j > 0)
    if moves:
        word = piece * BLOCK + tl.arange(0, BLOCK)
        inside = word < words
        source = words_at(states, layer, WORD, WIDE) + b * row_stride + j * snapshot_stride
        values = tl.load(source + word, mask=inside)
        tl.store(words_at(out, layer, WORD, WIDE) + row * out_stride + word, values, mask=inside)


def state_select(states, out, num_accepted, indices) -> None:
    state, into = states[0], (out or states)[0]
    size, B = state.element_size(), num_accepted.shape[0]
    length = state[0, 0].numel() * size
    strides = [stride * size for stride in (state.stride(0), state.stride(1), into.stride(0))]
    source = pointers("state_select", states)
    target = pointers("state_select", out) if out else source
    word, wide = word_of(source.bits | target.bits | strides[0] | strides[1] | strides[2] | length)
    words = length // word
    block = min(power_of_2(words), PIECE)
    pieces = -(-words // block)
    state_select_kernel[(B * len(states) * pieces,)](
        source.table, target.table, num_accepted, num_accepted if indices is None else indices, len(states), pieces,
        state.shape[1], into.shape[0], *(stride // word for stride in strides), words,
        BLOCK=block, WORD=word, WIDE=wide, IN_PLACE=not out, INDICES=indices is not None, **OPTIONS,
    )  # fmt: skip
