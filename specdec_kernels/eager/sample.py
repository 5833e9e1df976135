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
        greedy = p[s].greedy
        peaks = ((r.z == r.row_max[:, None]) & ~r.empty[:, None]).double()
        weights = torch.where(greedy[:, None], peaks, _rows.probs(r, p[s]))
        weights = _rows.to_target_vocab(weights, target_to_draft, vocab)
        if tokens.dim() == 1:
            raced = _rows.race(weights, seed[s], position[s], stream, ids[s])
            token = torch.where(greedy, weights.argmax(1), raced)[:, None]
            found = (weights > 0).any(1, keepdim=True)
        else:
            k = min(tokens.shape[1], vocab)
            # A greedy row's candidates are all its values, in their order; the sort keeps the lowest of equal ids first.
            ranks = _rows.to_target_vocab(_rows.ranks(r.z), target_to_draft, vocab)
            ranks = torch.where((ranks > 0) & (weights > 0).any(1, keepdim=True), ranks, -torch.inf)
            scores = _rows.race_scores(weights, seed[s], position[s], stream, ids[s])
            best, token = torch.where(greedy[:, None], ranks, scores).sort(dim=1, descending=True, stable=True)
            best, token = best[:, :k], token[:, :k]
            found = best > -torch.inf
        first = torch.arange(token.shape[1], device=token.device) == 0
        out = torch.where(found, token, torch.where(first, 0, -1)).to(torch.int32)
        log_p = torch.where(found & (~greedy[:, None] | first), weights.gather(1, token).log(), -torch.inf).float()
        if tokens.dim() == 1:
            out, log_p = out[:, 0], log_p[:, 0]
        else:  # a vocabulary smaller than what was asked for
            missing = (0, tokens.shape[1] - k)
            out = torch.nn.functional.pad(out, missing, value=-1)
            log_p = torch.nn.functional.pad(log_p, missing, value=-torch.inf)
        tokens[s] = out
        status[s] = r.status | (~(weights > 0).any(1)).int()
        if logprobs is not None:
            logprobs[s] = log_p
        if cutoff is not None:
            cutoff[s], row_max[s], log_mass[s] = r.cutoff.float(), r.row_max.float(), r.log_mass.float()


def gather_seed(seed, slots, rows):
    index = rows
    if slots is not None:
        index = slots if rows is None else slots[rows.long().clamp(0, slots.shape[0] - 1)]
    return seed if index is None else seed[index.long().clamp(0, seed.shape[0] - 1)]


_backends.register_eager("sample", sample)
