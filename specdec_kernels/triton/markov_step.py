"""`markov_step` in Triton: three launches, the biased rows and then those of `sample` over them."""

import triton
import triton.language as tl

from .._checks import fail
from ._launch import OPTIONS, check_vocab, power_of_2
from ._numerics import rounded_to_bfloat16
from .sample import sample

MAX_RANK = 4096
ELEMENTS = 8192
"""Of w2 that a program holds, 32 registers a thread; half as many where each needs an address of its own."""


@triton.jit(do_not_specialize=["num_rows", "width", "vocab"])
def markov_kernel(
    base, base_stride, previous, w1, w1_stride, w2, w2_stride, logits, logits_stride, num_rows, width, vocab, rank,
    BLOCK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Program t makes BLOCK logits of every row: it holds its part of w2 and goes through the rows, so that w2, which is most
    of what there is to read, is read once.

    Bytes: w2; a row of w1 for each program and row, from the cache; the logits read and written. Reads each logit before it writes it, so `logits` may be `base`.
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    k = tl.arange(0, RANK)
    mine = k < rank
    part = tl.load(w2 + (column[:, None] * w2_stride + k[None, :]), mask=inside[:, None] & mine[None, :], other=0.0)
    part = part.to(tl.float32)
    for i in range(0, num_rows):
        n = tl.zeros([], tl.int64) + i
        token = tl.load(previous + n).to(tl.int64)
        known = (token >= 0) & (token < vocab)
        head = tl.load(w1 + (token * w1_stride + k), mask=mine & known, other=0.0).to(tl.float32)
        bias = tl.sum(part * head[None, :], 1)
        z = tl.load(base + (n * base_stride + column), mask=inside, other=0.0).to(tl.float32)
        z = z + tl.where(known, bias, 0.0)  # w2 may hold what 0 times is no 0
        if logits.dtype.element_ty == tl.bfloat16:
            z = rounded_to_bfloat16(z)
        tl.store(logits + (n * logits_stride + column), z.to(logits.dtype.element_ty), mask=inside)


def markov_step(
    base_logits, previous, w1, w2, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft,
    stream, filter_order, logits, tokens, status, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    (N, width), (vocab, rank) = base_logits.shape, w1.shape
    check_vocab("markov_step", "base_logits", width)
    if target_to_draft is not None:
        check_vocab("markov_step", "target_to_draft", target_to_draft.shape[0])
    if rank > MAX_RANK:
        fail("markov_step", "w1", f"of rank {MAX_RANK} at most for backend 'triton'", str(rank))
    padded = power_of_2(rank)
    aligned = w2.data_ptr() % 16 == 0 and w2.stride(0) % 16 == 0
    block = min((ELEMENTS if aligned else ELEMENTS // 2) // padded, 128)
    markov_kernel[(-(-width // block),)](
        base_logits, base_logits.stride(0), previous, w1, w1.stride(0), w2, w2.stride(0), logits, logits.stride(0),
        N, width, vocab, rank, BLOCK=block, RANK=padded, **OPTIONS,
    )  # fmt: skip
    sample(
        logits, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft, stream, filter_order,
        tokens, status, None, cutoff, row_max, log_mass,
    )  # fmt: skip
