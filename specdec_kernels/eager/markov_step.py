"""`markov_step` in plain torch."""

import torch

from .. import _backends
from . import _rows
from .sample import sample


def markov_step(
    base_logits, previous, w1, w2, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft,
    stream, filter_order, logits, tokens, status, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    (N, width), rank = base_logits.shape, w1.shape[1]
    known = (previous >= 0) & (previous < w1.shape[0])
    head = w1[previous.long().clamp(0, w1.shape[0] - 1)].double()
    step = max(_rows.CHUNK_ELEMENTS // (N * rank), 1)
    for i in range(0, width, step):
        s = slice(i, i + step)
        # Not a matrix product, whose order of summation, so its last bits, may depend on the number of rows and threads.
        bias = (head[:, None] * w2[None, s].double()).sum(2)
        z = base_logits[:, s].double() + torch.where(known[:, None], bias, 0.0)
        logits[:, s] = z.to(logits.dtype)
    sample(
        logits, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft, stream, filter_order,
        tokens, status, None, cutoff, row_max, log_mass,
    )  # fmt: skip


_backends.register_eager("markov_step", markov_step)
