"""`sample` in plain torch."""

import torch

from .. import _backends
from . import _rows


def sample(
    logits, temperature, top_p, top_k, min_p, seed, slots, position, rows, ids, target_to_draft, stream, filter_order,
    tokens, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    p = _rows.gather_params(temperature, top_p, top_k, min_p, slots, rows)
    seed = gather_seed(seed, slots, rows)
    N = logits.shape[0]
    zeros = torch.zeros(N, dtype=torch.int64, device=logits.device)
    position = zeros if position is None else position
    ids = zeros if ids is None else ids.long()
    vocab = target_to_draft.shape[0] if target_to_draft is not None else logits.shape[1]
    step = max(_rows.CHUNK_ELEMENTS // logits.shape[1], 1)
    for i in range(0, N, step):
        s = slice(i, i + step)
        r = _rows.filter_rows(logits[s], p[s], filter_order)
        # A greedy row races nothing: all its maxima are candidates and the lowest target id wins.
        peaks = ((r.z == r.row_max[:, None]) & ~r.empty[:, None]).double()
        weights = torch.where(p[s].greedy[:, None], peaks, _rows.probs(r, p[s]))
        weights = _rows.to_target_vocab(weights, target_to_draft, vocab)
        raced = _rows.race(weights, seed[s], position[s], stream, ids[s])
        token = torch.where(p[s].greedy, weights.argmax(1), raced)
        tokens[s] = token.to(torch.int32)
        status[s] = r.status | (~(weights > 0).any(1)).int()
        if logprobs is not None:
            chosen = weights.gather(1, token[:, None])[:, 0]
            logprobs[s] = chosen.log().float()
        if cutoff is not None:
            cutoff[s], row_max[s], log_mass[s] = r.cutoff.float(), r.row_max.float(), r.log_mass.float()


def gather_seed(seed, slots, rows):
    index = rows
    if slots is not None:
        index = slots if rows is None else slots[rows.long().clamp(0, slots.shape[0] - 1)]
    return seed if index is None else seed[index.long().clamp(0, seed.shape[0] - 1)]


_backends.register_eager("sample", sample)
